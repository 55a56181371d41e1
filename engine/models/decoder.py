"""`Decoder`: a language model that reads and writes a `KVStorage`, checked to be right before it is used.

There are two ways to run one, chosen by `model_impl`:

    "transformers"   `HuggingFaceModel`: the unmodified model, whatever it is; only its attention is ours
    "native"         `NativeModel`: the Llama family in our own code, with fewer and larger operations
    "auto"           native where it applies

Some models would run and be silently wrong: those that ignore the attention interface, call attention twice in a layer,
or carry state beside attention. `load` looks for each of these and refuses, see `_refuse_by_config`, `_refuse_by_masks`
and `_refuse_by_run`; no list of names takes part. The native way passes the same checks against the unmodified model.
What the checks cannot see: behaviour that sets in only beyond a length that the short probe does not reach and that
shows neither in the configuration nor in the masks.

Shapes: N = rows of logits.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine.attention.partial import Storage
from engine.batch import Batch, Row, Span, build_batch
from engine.config import MODEL_IMPLS
from engine.errors import ModelNotFound, UnsupportedModel
from radixkv.storage import KVStorage, LayerShape

from .huggingface import HuggingFaceModel
from .native import NativeModel, why_not_native
from .smollm2 import DEMO_MODEL, demo_model_directory, quiet_progress_bars

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
# Rotary embeddings whose frequencies follow the longest sequence of a forward pass: keys already cached would keep the
# old rotation, and one request's length would change another's output.
_LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")

# How far logits may be from the model's own eager ones, relative to their spread (standard deviation) in each row.
# float32: sums in another order gave 1e-6 on tiny models and 5e-6 on 30 layers; a missing key, window or rotation gives
# more than 1e-2.
_FLOAT32_TOLERANCE = 1e-3
# 16 bits: rounding gave 0.04 on 30 layers, and a router may send a token to another expert: the median row is compared.
_HALF_TOLERANCE = 0.15
_PROBE_LENGTH = 11
_PROBE_BLOCK_SIZE = 4


class Model(Protocol):
    """A way to run a model."""

    def logits(self, batch: Batch, storage: Storage) -> Tensor:
        """The logits at `batch.logits_indices`, `(N, vocab_size)`; writes the KV of all new tokens to storage."""


class Decoder:
    """A model with its layer shapes, limits and tokenizer; made by `load`."""

    tokenizer: PreTrainedTokenizerBase | None
    """None where the directory has none, and for a model that was built by the caller."""
    name: str
    model_impl: str
    """How it is run: "native" or "transformers"."""
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_model_len: int
    """Tokens that fit, prompt and output together."""
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    """Of weights and KV."""
    device: torch.device

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        *,
        model_impl: str = "auto",
        is_ours: bool = False,
    ) -> None:
        """See `load`. is_ours: nobody else holds the model, and it may be taken apart."""
        _refuse_by_config(model.config)
        if not getattr(model, "_supports_attention_backend", False):
            raise UnsupportedModel(
                model.config.model_type,
                f"{type(model).__name__} does not declare support for attention backends, so its attention may bypass "
                "the block tables",
            )
        config = model.config.get_text_config(decoder=True)
        self.tokenizer = tokenizer
        self.name = name
        self.dtype = model.dtype
        self.device = model.device
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.max_model_len = _max_model_len(config)
        self.eos_token_ids = _eos_token_ids(model)
        self._config = model.config
        why_not = why_not_native(model) if model_impl != "transformers" else "not wanted"
        if why_not is not None and model_impl == "native":
            raise self._refuse(f"model_impl='native' does not cover it: {why_not}; 'auto' does")

        huggingface = HuggingFaceModel(model, is_ours=is_ours)
        spans = self._refuse_by_masks(huggingface)
        self._probe_ids = _probe_ids(min(_PROBE_LENGTH, self.max_model_len), self.vocab_size)
        with self._refusing():
            truth = huggingface.eager_logits(self._probe_ids)  # (probe length, vocab_size)
        if why_not is None:
            self.model_impl = "native"
            self._model: Model = NativeModel(model, spans, takes_weights=is_ours)
        else:
            self.model_impl = "transformers"
            huggingface.pack()
            self._model = huggingface
        self.layers = self._refuse_by_run(truth)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | PreTrainedModel,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        model_impl: str = "auto",
    ) -> Decoder:
        """A decoder that was checked to be right through block tables.

        model: a hub id, a local directory, "smollm2-135m" (the demo model, fetched once), or a model already built,
        which is put on `device` and is otherwise left alone; on a CPU the weights of its linear layers are then held
        twice, and changing them later has no effect here. dtype: "auto" (the checkpoint's), "float32", "bfloat16",
        "float16" or the torch dtype; a built model must have it already. device: as torch names it, or "auto": a GPU if
        there is one. model_impl: see above.

        Raises `ModelNotFound` for a name with no model behind it, `UnsupportedModel` for one that would be wrong here,
        `ValueError` for an unknown dtype, device or model_impl, `DemoModelUnavailable` where the demo model cannot be
        fetched. The checks cost five forward passes of at most 17 tokens.
        """
        wanted = _dtype(dtype)
        device = _device(device)
        if model_impl not in MODEL_IMPLS:
            raise ValueError(f"model_impl={model_impl!r}: one of {', '.join(map(repr, MODEL_IMPLS))} is needed")
        if isinstance(model, PreTrainedModel):
            if wanted not in ("auto", model.dtype):
                # .to(dtype) would also round the rotary frequencies, which from_pretrained keeps in float32.
                raise ValueError(f"dtype={dtype}: the model is {model.dtype} already; give the dtype when building it")
            name = model.config.name_or_path or model.config.model_type
            return cls(model.to(device), None, name, model_impl=model_impl)
        if not isinstance(model, str | os.PathLike):
            raise TypeError(f"model is a {type(model).__name__}: a hub id, a directory, or a PreTrainedModel is needed")
        name = os.fspath(model)
        source = str(demo_model_directory()) if name == DEMO_MODEL else _directory_or_hub_id(name)
        model_type = "unknown"
        with quiet_progress_bars():
            try:
                config = AutoConfig.from_pretrained(source)
                model_type = config.model_type
                _refuse_by_config(config)
                loaded = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=wanted)
            except UnsupportedModel:
                raise
            except OSError as error:
                raise ModelNotFound(_not_found(name, _first_line(error))) from error
            except ValueError as error:  # an architecture without a decoder, or one that needs code of the repository's
                raise UnsupportedModel(
                    model_type, f"transformers has no decoder for it: {_first_line(error)}"
                ) from error
        return cls(loaded.to(device), _tokenizer(source), name, model_impl=model_impl, is_ours=True)

    def forward(self, batch: Batch, storage: KVStorage) -> Tensor:
        """The logits at `batch.logits_indices`, `(N, vocab_size)` float32; writes the KV of all new tokens to storage.

        Raises `ValueError`, before anything is written, where batch and storage do not belong together.
        """
        metadata = batch.metadata
        if metadata.block_size != storage.block_size:
            raise ValueError(
                f"the batch has blocks of {metadata.block_size} tokens, the storage of {storage.block_size}"
            )
        if metadata.min_num_blocks > storage.num_blocks:
            raise ValueError(
                f"the batch names block {metadata.min_num_blocks - 1}: the storage has blocks [0, {storage.num_blocks})"
            )
        if storage.layers != self.layers:
            raise ValueError(f"the storage has other layers than {self.name}: make it with decoder.layers")
        return self._model.logits(batch, storage).float()

    def _refuse(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(self._config.model_type, reason)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turns what a model raises inside into an `UnsupportedModel`."""
        try:
            yield
        except (UnsupportedModel, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self._refuse(
                f"its forward pass does not fit the attention interface: {_first_line(error)}"
            ) from error

    def _refuse_by_masks(self, model: HuggingFaceModel) -> dict[int, Span]:
        """What each layer's queries see; raises `UnsupportedModel` where the masks that the model builds differ.

        The model builds its masks from functions of (query position, key position). Asked at positions around a window
        and at the far end of the context, they tell what a prompt of that length would, without running one.
        """
        with self._refusing():
            seen = model.masks(_probe_ids(2, self.vocab_size))
        config = self._config.get_text_config(decoder=True)
        sizes = {1, self.max_model_len // 2, self.max_model_len}
        sizes |= {getattr(config, name, None) or 1 for name in ("sliding_window", "attention_chunk_size")}
        queries = sorted({size + extra for size in sizes for extra in (-1, 0, 1)} | {2 * size + 3 for size in sizes})
        pairs = [
            (q, kv)
            for q in queries
            if q < self.max_model_len
            for kv in sorted({0, 1, q - 1, q, q + 1} | {q - size + extra for size in sizes for extra in (-1, 0, 1)})
            if kv >= 0
        ]
        query, key = (torch.tensor(side, device=self.device) for side in zip(*pairs, strict=True))
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        for layer, (span, mask_function) in sorted(seen.items()):
            if mask_function is None:
                continue
            theirs = mask_function(zero, zero, query, key).expand(len(pairs)).tolist()
            for (q, kv), visible in zip(pairs, theirs, strict=True):
                if visible != (span.first_visible(q) <= kv <= q):
                    raise self._refuse(
                        f"layer {layer} {'shows' if visible else 'hides'} position {kv} to position {q}, "
                        f"which is not causal attention with {span}"
                    )
        return {layer: span for layer, (span, _) in seen.items()}

    def _refuse_by_run(self, truth: Tensor) -> tuple[LayerShape, ...]:
        """The shape of each layer's KV, found by running; raises `UnsupportedModel` where the results would be wrong.

        1. The model's own eager logits of a short prompt are the truth: (length, vocab_size).
        2. The prompt runs through scattered blocks twice, side by side in one batch: whole, and in pieces with a decode
           step at the end. State beside attention (a recurrence, a convolution) is lost between pieces, and mixes the
           rows of a batch; attention that bypasses our function lets rows see each other.
        3. Each layer must have called the function exactly once in each pass.
        """
        ids = self._probe_ids
        middle, last = len(ids) // 2, len(ids) - 1
        whole, split = [5, 1, 3], [0, 6, 2]
        steps = [
            [Row(ids, 0, whole), Row(ids[:middle], 0, split)],
            [Row(ids[middle:last], middle, split)],
            [Row(ids[last:], last, split)],
        ]
        num_layers = self._config.get_text_config(decoder=True).num_hidden_layers
        storage = _ProbeStorage(num_slots=7 * _PROBE_BLOCK_SIZE)
        logits = []
        with self._refusing():
            for number, rows in enumerate(steps, start=1):  # 2.
                batch = build_batch([row for row in rows if row.token_ids], _PROBE_BLOCK_SIZE, self.device)
                everywhere = torch.arange(batch.input_ids.shape[1], device=self.device)
                batch = dataclasses.replace(batch, logits_indices=everywhere)
                logits.append(self._model.logits(batch, storage).float())
                self._refuse_by_calls(storage.num_calls, num_layers, number)  # 3.
        at_once, pieces = logits[0][: len(ids)], torch.cat([logits[0][len(ids) :], *logits[1:]])
        self._refuse_by_difference(at_once, truth, "computed at once, in a batch with another")
        self._refuse_by_difference(pieces, truth, "computed in pieces (it may keep state beside its keys and values)")
        return tuple(storage.shapes[layer] for layer in range(num_layers))

    def _refuse_by_calls(self, num_calls: dict[int, int], num_layers: int, num_passes: int) -> None:
        missing = [layer for layer in range(num_layers) if layer not in num_calls]
        if missing:
            raise self._refuse(
                f"{len(missing)} of its {num_layers} layers (first: {missing[0]}) never reach the attention function, "
                "so they keep state elsewhere or bypass the block tables"
            )
        extra = sorted(num_calls.keys() - range(num_layers))
        if extra:
            raise self._refuse(f"it attends in layers {extra}, beyond its {num_layers} layers")
        repeated = [layer for layer, count in num_calls.items() if count != num_passes]
        if repeated:
            count = num_calls[repeated[0]] / num_passes
            raise self._refuse(
                f"layer {repeated[0]} calls the attention function {count:g} times in a forward pass; with one KV "
                "entry per layer and token it must be once"
            )

    def _refuse_by_difference(self, logits: Tensor, truth: Tensor, how: str) -> None:
        errors = (logits - truth).norm(dim=-1) / (truth - truth.mean(-1, keepdim=True)).norm(dim=-1)  # (length,)
        if self.dtype == torch.float32:
            error, tolerance = errors.max().item(), _FLOAT32_TOLERANCE
        else:
            error, tolerance = errors.median().item(), _HALF_TOLERANCE
        if not error <= tolerance:  # also refuses NaN
            raise self._refuse(
                f"the logits of a short prompt {how}, differ from the model's own by {error:.2g} of their spread "
                f"(allowed: {tolerance:g})"
            )


def _probe_ids(length: int, vocab_size: int) -> list[int]:
    # Far apart in the vocabulary, so that no two neighbours are alike.
    return [(17 + 7919 * index) % vocab_size for index in range(length)]


class _ProbeStorage:
    """A storage that takes each layer's shape from the first K and V written, and counts the writes."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.shapes: dict[int, LayerShape] = {}
        self.num_calls: dict[int, int] = {}
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}

    def keys(self, layer: int) -> Tensor:
        return self._pools[layer][0]

    def values(self, layer: int) -> Tensor:
        return self._pools[layer][1]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        if layer not in self._pools:
            self.shapes[layer] = LayerShape(k.shape[1], k.shape[2], v.shape[2])
            # NaN: a slot that is read before it was written shows in the logits.
            self._pools[layer] = (
                k.new_full((self.num_slots, *k.shape[1:]), float("nan")),
                v.new_full((self.num_slots, *v.shape[1:]), float("nan")),
            )
        self.num_calls[layer] = self.num_calls.get(layer, 0) + 1
        keys, values = self._pools[layer]
        keys[slots], values[slots] = k, v


def _refuse_by_config(config: PreTrainedConfig) -> None:
    """Raises `UnsupportedModel` for what the configuration alone tells, before any weight is read."""
    text = config.get_text_config(decoder=True)

    def refuse(reason: str) -> UnsupportedModel:
        return UnsupportedModel(config.model_type, reason)

    if config.is_encoder_decoder:
        raise refuse("it is an encoder-decoder, and only decoders are supported")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if others:
        raise refuse(f"it has layers of type {', '.join(others)}; supported are {', '.join(_LAYER_TYPES)}")
    for rope_type in _rope_types(text):
        if any(name in rope_type for name in _LENGTH_DEPENDENT_ROPES):
            raise refuse(
                f"its rotary embedding (rope_type {rope_type!r}) changes with the sequence length, so that cached keys "
                "would go stale"
            )
    if getattr(text, "attn_temperature_tuning", False) and not all(getattr(text, "no_rope_layers", None) or [1]):
        # Scales queries by a position that it counts from a cache object, not from position_ids; shows only beyond
        # thousands of tokens, so no probe would see it.
        raise refuse("attn_temperature_tuning takes positions from a cache object, which there is not")


def _rope_types(config: PreTrainedConfig) -> list[str]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # One set of parameters, or one for each layer type.
    groups = [rope, *(group for group in rope.values() if isinstance(group, dict))]
    return [kind for group in groups if isinstance(kind := group.get("rope_type", group.get("type")), str)]


def _max_model_len(config: PreTrainedConfig) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            return length
    raise UnsupportedModel(config.model_type, "its configuration names no context length")


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    ids: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config(decoder=True)):
        found = getattr(source, "eos_token_id", None)
        ids.update([found] if isinstance(found, int) else found or ())
    return frozenset(ids)


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(name)
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: 'auto', or a torch device such as 'cpu' or 'cuda:0' is needed") from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without the driver, or the build
        raise ValueError(f"device={str(device)!r}: this machine's torch cannot use it; 'cpu' always works") from error
    return device


def _dtype(dtype: str | torch.dtype) -> torch.dtype | str:
    if dtype == "auto" or dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise ValueError(f"dtype={dtype!r}: one of 'auto', {', '.join(map(repr, DTYPES))} is needed")


def _directory_or_hub_id(name: str) -> str:
    """What transformers should load; raises `ModelNotFound`, without asking the hub, where it cannot be either."""
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(_not_found(name, "the directory has no config.json"))
        return str(path)
    if name and path.exists():
        raise ModelNotFound(_not_found(name, "it is a file"))
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name):
        raise ModelNotFound(_not_found(name, "no such directory, and a hub id cannot look like this"))
    return name


def _not_found(name: str, reason: str) -> str:
    return (
        f"no model at {name!r}: {reason}. Allowed are a hub id such as 'HuggingFaceTB/SmolLM2-135M-Instruct', "
        f"a local directory with config.json and weights, and {DEMO_MODEL!r}"
    )


def _tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if Path(source).is_dir() and not any((Path(source) / name).is_file() for name in names):
        return None
    return AutoTokenizer.from_pretrained(source)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
