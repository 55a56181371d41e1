"""The demo model, a real one of 30 layers: the engine says what transformers' own `generate()` says, cold and warm."""

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the engine needs transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from engine import LLM, SamplingParams  # noqa: E402
from engine.chats import ChatSession  # noqa: E402

TEXTS = [
    "The three largest lakes of Africa are",
    "Question: why does bread rise in a warm kitchen, and why does it fall again when it is left too long?\nAnswer:",
    "def longest_common_prefix(words):\n    ",
]
NUM_NEW = 24
SYSTEM = "You are a patient gardener. You answer in one or two short sentences, and you never use lists."


@pytest.fixture(scope="module")
def llm(demo_model):
    """The demo model in float32, over a pool that is used by every test here."""
    return LLM(demo_model, dtype="float32", num_blocks=64)


def test_tokens_equal_those_of_the_model_alone_cold_and_warm(llm, demo_model):
    """Real weights have near ties that random ones do not; float32 keeps the order of the model's own logits."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32), llm.tokenizer
    prompts = [tokenizer.encode(text) for text in TEXTS]
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": sorted(llm.eos_token_ids)}
    wanted = [model.generate(torch.tensor([ids]), **options, pad_token_id=0)[0, len(ids) :].tolist() for ids in prompts]
    params = SamplingParams(max_tokens=NUM_NEW)
    for hits in ([0, 0, 0], [len(ids) - 1 for ids in prompts]):
        outputs = llm.generate(TEXTS, params)
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        assert [output.num_cached_tokens for output in outputs] == hits
        assert [output.outputs[0].text for output in outputs] == tokenizer.batch_decode(
            wanted, skip_special_tokens=True
        )
    llm.cache.check()
    assert llm.cache.num_private_blocks == llm.cache.num_protected_blocks == 0


def test_a_chat_hits_all_of_the_turn_before(llm):
    """C115: a session keeps ids, so the second turn computes the new message and the one token that had no KV."""
    params = SamplingParams(max_tokens=10)
    session = ChatSession(llm.tokenizer, SYSTEM, end_token_ids=llm.eos_token_ids)
    (first,) = llm.generate({"prompt_token_ids": session.user("When should I prune roses?")}, params)
    session.assistant(first.outputs[0].token_ids)
    (second,) = llm.generate({"prompt_token_ids": session.user("And how far down?")}, params)
    assert second.num_cached_tokens == len(first.prompt_token_ids) + len(first.outputs[0].token_ids) - 1
    (cold,) = llm.without_cache().generate({"prompt_token_ids": second.prompt_token_ids}, params)
    assert cold.num_cached_tokens == 0
    assert second.outputs[0].token_ids == cold.outputs[0].token_ids
