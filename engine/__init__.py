"""engine: a decoder that lives on radixkv.

`LLM` (or `AsyncLLM`) and `SamplingParams` are what a user needs; they are imported when first asked for, so that the
command line and the scheduler work without loading torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .beam_search import BeamSearchParams
    from .llm import LLM
    from .request import RequestOutput
    from .sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "BeamSearchParams", "RequestOutput", "SamplingParams"]

_HOMES = {
    "AsyncLLM": ".async_llm",
    "BeamSearchParams": ".beam_search",
    "LLM": ".llm",
    "RequestOutput": ".request",
    "SamplingParams": ".sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name], __name__), name)
