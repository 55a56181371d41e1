"""Our engine, through `LLM`. Steps by hand what `LLM.generate` does, so that first tokens can be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch

from engine import LLM, SamplingParams


class Engine:
    """See `worker.Engine`. settings["llm"]: further arguments of `LLM`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        pool: dict[str, Any] = {"kv_cache_memory": f"{settings['kv_gib']}GiB"}
        if settings["num_blocks"]:
            pool = {"num_blocks": settings["num_blocks"]}
        self._llm = LLM(
            settings["model"],
            dtype=settings["dtype"],
            max_num_seqs=settings["max_batch"],
            log_interval_s=0,
            **pool,
            **settings["llm"],
        )
        try:
            self.version = metadata.version("radixkv")
        except metadata.PackageNotFoundError:
            self.version = "source tree"

    def generate(
        self,
        prompts: list[list[int]],
        num_output_tokens: int,
        conversations: list[int] | None,
        record: Callable[[int, Sequence[int]], None],
    ) -> list[int]:
        """See `worker.Engine`."""
        llm, core = self._llm, self._llm.core
        params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
        requests = [llm.make_request(prompt, params) for prompt in prompts]
        for request in requests:
            core.add_request(request)
        num_recorded = [0] * len(requests)
        while core.has_requests:
            core.step()
            for index, request in enumerate(requests):
                new = request.output_token_ids[num_recorded[index] :]
                if new:
                    num_recorded[index] += len(new)
                    record(index, new)
        return [llm.output_of([request]).num_cached_tokens for request in requests]

    def forget(self) -> None:
        """See `worker.Engine`."""
        self._llm.cache.reset()

    def close(self) -> None:
        """See `worker.Engine`: nothing was started."""
