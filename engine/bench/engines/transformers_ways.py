"""Plain `transformers`, in three ways.

static     generate() on all prompts as one padded batch, the whole history computed every turn
kept       generate() one conversation at a time, each with a DynamicCache that is kept between turns
batching   continuous batching, which shares equal starts of prompts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

_NO_TOKEN = -1  # what ends a sequence: nothing
_PAGE_SIZE = 32  # tokens a block of its paged cache
_PATIENCE_S = 600  # for one token of continuous batching


class _OnStep(LogitsProcessor):
    """generate() calls it with all tokens so far before it takes the next one from the scores."""

    def __init__(self, num_prompt_tokens: int, record: Callable[[int, Sequence[int]], None]) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._record = record

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores as they are. Greedy: the highest is the next token, which is on its way to the user now."""
        if input_ids.shape[1] == self._num_prompt_tokens:
            for row, token_id in enumerate(scores.argmax(-1).tolist()):
                self._record(row, [token_id])
        return scores


class Engine:
    """See `worker.Engine`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(settings["threads"])
        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        self._way = settings["argument"]
        self._settings = settings
        self._model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"]), attn_implementation="sdpa"
        ).eval()
        self._caches: dict[int, DynamicCache] = {}
        self._manager: Any = None

    def generate(
        self,
        prompts: list[list[int]],
        num_output_tokens: int,
        conversations: list[int] | None,
        record: Callable[[int, Sequence[int]], None],
    ) -> list[int] | None:
        """See `worker.Engine`."""
        if self._way == "batching":
            return self._generate_batching(prompts, num_output_tokens, record)
        if self._way == "static":
            self._generate(prompts, num_output_tokens, record)
            return [0] * len(prompts)
        if conversations is None:
            return self._generate_from_one_start(prompts, num_output_tokens, record)
        num_cached = []
        for index, (prompt, conversation) in enumerate(zip(prompts, conversations, strict=True)):
            cache = self._caches.setdefault(conversation, DynamicCache(config=self._model.config))
            num_cached.append(cache.get_seq_length())
            self._generate([prompt], num_output_tokens, lambda _, ids, index=index: record(index, ids), cache)
        return num_cached

    def _generate(
        self,
        prompts: list[list[int]],
        num_output_tokens: int,
        record: Callable[[int, Sequence[int]], None],
        cache: DynamicCache | None = None,
    ) -> None:
        """One call of generate(), shorter prompts padded on the left. With a cache: its tokens are not computed."""
        longest = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])  # (B, T)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])  # (B, T)
        output = self._model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=num_output_tokens,
            do_sample=False,
            eos_token_id=_NO_TOKEN,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([_OnStep(longest, record)]),
            **({} if cache is None else {"cache": cache}),
        )
        for row, token_ids in enumerate(output[:, longest + 1 :].tolist()):
            record(row, token_ids)

    @torch.inference_mode()
    def _generate_from_one_start(
        self, prompts: list[list[int]], num_output_tokens: int, record: Callable[[int, Sequence[int]], None]
    ) -> list[int]:
        """Computes what all prompts start with once, and copies its cache for each; prompts of equal length."""
        shared = next(
            (at for at, ids in enumerate(zip(*prompts, strict=True)) if len(set(ids)) > 1), len(prompts[0]) - 1
        )
        cache = DynamicCache(config=self._model.config)
        if len(prompts) > 1 and shared:
            self._model(torch.tensor([prompts[0][:shared]]), cache=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(len(prompts))
        else:
            shared = 0
        self._generate(prompts, num_output_tokens, record, cache)
        return [0] + [shared] * (len(prompts) - 1)

    def _generate_batching(
        self, prompts: list[list[int]], num_output_tokens: int, record: Callable[[int, Sequence[int]], None]
    ) -> None:
        """All prompts handed to the running manager; nothing is told about hits."""
        index_of = {
            self._manager.add_request(list(prompt), max_new_tokens=num_output_tokens, streaming=True): index
            for index, prompt in enumerate(prompts)
        }
        num_recorded = dict.fromkeys(index_of, 0)
        unfinished = set(index_of)
        while unfinished:
            result = self._manager.get_result(timeout=_PATIENCE_S)
            if result is None:
                raise RuntimeError(f"continuous batching gave no token for {_PATIENCE_S} s")
            if result.error:
                raise RuntimeError(result.error)
            name = result.request_id
            record(index_of[name], result.generated_tokens[num_recorded[name] :])
            num_recorded[name] = len(result.generated_tokens)
            if result.is_finished():
                unfinished.discard(name)

    def forget(self) -> None:
        """See `worker.Engine`. A new manager has an empty cache."""
        self._caches.clear()
        if self._way != "batching":
            return
        self.close()
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=_PAGE_SIZE,
                num_blocks=self._settings["num_kv_tokens"] // _PAGE_SIZE,
                max_batch_tokens=2048,
                max_requests_per_batch=self._settings["max_batch"],
                allow_block_sharing=True,
            ),
        )
        self._manager.start()
        # The first request waits for the pool to be made, which is no part of serving it.
        self._generate_batching([[1]], 1, lambda index, token_ids: None)

    def close(self) -> None:
        """See `worker.Engine`."""
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager = None
