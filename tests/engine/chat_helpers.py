"""What the tests of chats share: a tokenizer built on the spot, a fake `LLM`, and a real tiny model that can chat."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(chat_template, merges=(), eos="<|im_end|>", special=("<|im_start|>", "<|im_end|>")):
    """A byte-level BPE tokenizer with the given merges; without any, each byte is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)
    wrapped.chat_template = chat_template
    return wrapped


class CharTokenizer:
    """One id for each character; id 0 ends a reply. It has no chat template."""

    eos_token_id = 0
    chat_template = None

    def __call__(self, text, add_special_tokens=False, verbose=True):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids, **options):
        return "".join(map(chr, ids))

    def get_added_vocab(self):
        return {}


@dataclass
class FakeLLM:
    """The surface of `LLM` without a model.

    Its reply depends on the prompt alone, and every third one ends before its limit. It counts hits the obvious way: it
    remembers every sequence that has KV and looks for the longest common start. A token computed takes a second.
    """

    is_caching: bool = True
    max_model_len: int = 100_000
    num_blocks: int = 100_000
    log: list[tuple[str, int]] = field(default_factory=list)
    is_wrong_when_cold: bool = False

    model_name, dtype_name, block_size, eos_token_ids = "fake", "float32", 4, frozenset({0})

    def __post_init__(self):
        self.tokenizer = CharTokenizer()
        self.cache = SimpleNamespace(num_blocks=self.num_blocks, show=lambda decode: "root\n  node")
        self.sequences: list[list[int]] = []
        self.cold: FakeLLM | None = None

    def without_cache(self):
        self.cold = FakeLLM(False, self.max_model_len, self.num_blocks, self.log, self.is_wrong_when_cold)
        return self.cold

    def generate(self, prompts, params):
        self.log.append(("warm" if self.is_caching else "cold", len(prompts)))
        return [self.answer(prompt["prompt_token_ids"], params) for prompt in prompts]

    def answer(self, prompt, params):
        hit = 0
        if self.is_caching:
            common = (sum(1 for _ in self.common(prompt, sequence)) for sequence in self.sequences)
            hit = min(max(common, default=0), len(prompt) - 1)
        start = 97 + sum(prompt) % 20
        ids = [start + i % 5 for i in range(params.max_tokens)]
        if len(prompt) % 3 == 0:
            ids = [*ids[: params.max_tokens // 2], 0]
        if self.is_wrong_when_cold and not self.is_caching:
            ids[0] += 1
        self.sequences.append([*prompt, *ids[:-1]])  # the last id was sampled and has no KV
        return SimpleNamespace(
            outputs=[SimpleNamespace(text="", token_ids=tuple(ids), finish_reason="length")],
            prompt_token_ids=tuple(prompt),
            num_cached_tokens=hit,
            metrics=SimpleNamespace(ttft_s=float(len(prompt) - hit), tpot_s=0.5 if len(ids) > 1 else None),
        )

    @staticmethod
    def common(a, b):
        for left, right in zip(a, b, strict=False):
            if left != right:
                return
            yield left


def save_tiny_chat_model(folder: Path) -> str:
    """The directory of a Llama with random weights and a tokenizer with a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(CHATML, merges=[("e", "r"), ("s", "t")])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
