"""llama.cpp's server in this process (PyPI `xllamacpp`), a slot for each conversation.

Tokens are asked for with the log-probability of the sampled one, which is how their ids are told; that costs less than
the steps vary.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import xllamacpp

_KV_TYPES = {"float32": "GGML_TYPE_F32", "bfloat16": "GGML_TYPE_BF16", "f16": "GGML_TYPE_F16"}


class Engine:
    """See `worker.Engine`. settings["argument"]: "same" (KV in the dtype of the weights) or "f16"."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = f"xllamacpp {xllamacpp.__version__}"
        self._num_slots = settings["conversations"]
        params = xllamacpp.CommonParams()
        params.model.path = settings["gguf"]
        params.n_parallel = self._num_slots
        params.n_ctx = settings["num_kv_tokens"]
        params.kv_unified = True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
        kind = settings["dtype"] if settings["argument"] == "same" else settings["argument"]
        params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, _KV_TYPES[kind])
        # A slot keeps its conversation: nothing needs to be moved to memory and back, and `forget` is thorough.
        params.cache_ram_mib = 0
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def generate(
        self,
        prompts: list[list[int]],
        num_output_tokens: int,
        conversations: list[int] | None,
        record: Callable[[int, Sequence[int]], None],
    ) -> list[int]:
        """See `worker.Engine`. More prompts than slots wait for one."""
        num_cached = [0] * len(prompts)
        errors: list[str] = []

        def complete(index: int) -> None:
            def take(chunk: Any) -> bool:
                if isinstance(chunk, (bytes, str)):
                    chunk = json.loads(chunk)
                if "error" in chunk:
                    errors.append(str(chunk["error"]))
                for choice in chunk.get("choices", ()):
                    of_tokens = choice["logprobs"] or {"content": ()}
                    record(index, [token["id"] for token in of_tokens["content"]])
                usage = chunk.get("usage")
                if usage:
                    num_cached[index] = usage["prompt_tokens_details"]["cached_tokens"]
                return False

            request: dict[str, Any] = {
                "prompt": prompts[index],
                "n_predict": num_output_tokens,
                "temperature": 0,
                "top_k": 1,
                "samplers": ["top_k"],
                "ignore_eos": True,
                "cache_prompt": True,
                "stream": True,
                "logprobs": 1,
            }
            if conversations is not None:
                request["id_slot"] = conversations[index]
            self._server.handle_completions(request, take)

        threads = [threading.Thread(target=complete, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise RuntimeError(errors[0])
        return num_cached

    def forget(self) -> None:
        """See `worker.Engine`. A slot forgets its text when another begins in it."""
        for slot in range(self._num_slots):
            self.generate([[slot + 100]], 1, [slot], lambda index, token_ids: None)

    def close(self) -> None:
        """See `worker.Engine`. The server's threads do not end by themselves."""
        os._exit(0)
