"""When a model is run in our own code, and that nothing is lost by it; that it is right: see test_architectures."""

import pytest

torch = pytest.importorskip("torch", reason="models need torch")
transformers = pytest.importorskip("transformers", reason="models need transformers")

from engine import LLM, SamplingParams  # noqa: E402
from engine.errors import UnsupportedModel  # noqa: E402
from engine.models.decoder import Decoder  # noqa: E402
from engine.models.native import NativeModel  # noqa: E402
from tiny_models import NATIVE, SUPPORTED, tiny_model  # noqa: E402

PROMPTS = [[5, 9, 17, 33, 40], list(range(3, 30)), [7]]


@pytest.mark.parametrize("name", SUPPORTED)
def test_auto_is_native_for_the_family_and_the_library_for_all_others(name):
    """The fast way needs no asking for, and never stands for a model that it does not know."""
    decoder = Decoder.load(tiny_model(name))
    assert decoder.model_impl == ("native" if name in NATIVE else "transformers")


@pytest.mark.parametrize("name", NATIVE)
def test_both_ways_say_the_same(name):
    """Greedy ids of the whole engine, in float32."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    said = []
    for model_impl in ("native", "transformers"):
        llm = LLM(tiny_model(name), model_impl=model_impl, num_blocks=64, block_size=4)
        assert llm.model_impl == model_impl
        said.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)])
    assert said[0] == said[1]


def test_native_is_refused_with_the_reason_where_it_does_not_apply():
    """Someone who asks for it wants to know why not, rather than get something else."""
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel.*'auto' does"):
        Decoder.load(tiny_model("gpt2"), model_impl="native")


def _hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output + 0.1)


def _forward(model):
    norm = model.model.norm
    plain = norm.forward
    norm.forward = lambda x: 2 * plain(x)


def _subclass(model):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.layers[0].mlp.up_proj.__class__ = Doubled


def _activation(model):
    model.config.hidden_act = "gelu"


@pytest.mark.parametrize("change", [_hook, _forward, _subclass, _activation])
def test_a_changed_model_of_the_family_runs_as_it_is(change):
    """Hooks, patched forwards and other layers must not be lost in silence."""
    model = tiny_model("llama")
    change(model)
    assert Decoder.load(model).model_impl == "transformers"


def test_weights_that_differ_from_what_was_checked_are_noticed(monkeypatch):
    """The native way is compared with the unmodified model before anyone uses it."""
    build = NativeModel._layer

    def with_wrong_norm(self, layer, span):
        built = build(self, layer, span)
        built.mlp_norm.mul_(1.5)
        return built

    monkeypatch.setattr(NativeModel, "_layer", with_wrong_norm)
    with pytest.raises(UnsupportedModel, match="differ from the model's own"):
        Decoder.load(tiny_model("llama"))


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_the_callers_model_keeps_its_weights_and_a_loaded_one_gives_them_up(model_impl, tmp_path):
    """A model from a directory is held once, packed; a model of the caller's goes on working."""
    model = tiny_model("llama")
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.train()
    Decoder.load(model, model_impl=model_impl)
    assert model.training, "its mode is its owner's"
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert all(type(module).__name__ != "PackedLinear" for module in model.modules())

    model.save_pretrained(tmp_path)
    plain = []
    load = transformers.AutoModelForCausalLM.from_pretrained

    def remember(*args, **kwargs):
        plain.append(load(*args, **kwargs))
        return plain[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", remember)
        decoder = Decoder.load(tmp_path, model_impl=model_impl)
    assert decoder.model_impl == model_impl
    linears = [module for module in plain[0].model.layers.modules() if type(module) is torch.nn.Linear]
    assert not [linear for linear in linears if linear.weight.device.type != "meta"]
