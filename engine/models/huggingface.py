"""`HuggingFaceModel`: any Hugging Face decoder, its code unmodified, with attention through block tables.

The universal way to run a model. It is run on flattened tokens `(1, T)` with explicit positions, no mask and no cache
object. It hands the queries, keys and values of each layer to an attention function registered with transformers; the
function writes K and V to their slots and attends through the block tables. What it needs travels as keyword arguments
of the model's forward down to it, so nothing is kept in a global and two models never meet.

    logits(batch, storage) → model(input_ids, position_ids, block_metadata=, kv_storage=)
                             └ each layer → _block_attention(module, q, k, v, block_metadata=, kv_storage=)

On a CPU its linear layers are packed, see `packed.py`.

Shapes: T = new tokens of all rows, H = query heads, K = KV heads, D = width of a key, E = width of a value.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from engine.attention import attend
from engine.attention.partial import Storage
from engine.batch import AttentionMetadata, Batch, Span

from .packed import pack_linears

_ATTENTION = "radixkv_blocks"
_MASK_PROBE = "radixkv_mask_probe"
_ABSENT = object()

MaskFunction = Callable[..., Tensor]
"""(batch, head, query position, key position) → whether the key is seen; as transformers builds masks from."""


class HuggingFaceModel:
    """A decoder of transformers, run through block tables.

    is_ours: the model may be changed, as nobody else holds it. Otherwise the modules are copied and the weights shared,
    so that ordinary forwards and `generate()` on the caller's model go on as before; what is packed is a second copy of
    those weights, and later changes to them are not seen here.
    """

    def __init__(self, model: PreTrainedModel, *, is_ours: bool) -> None:
        self._model = (model if is_ours else _with_shared_weights(model)).eval()
        self._configs = _configs_of(self._model)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._attend_by(_ATTENTION)

    def pack(self) -> None:
        """Lays the weights of its linear layers out for this CPU; what it computes stays what it was."""
        pack_linears(self._model)

    @torch.no_grad()
    def logits(self, batch: Batch, storage: Storage) -> Tensor:
        """The logits at `batch.logits_indices`, `(N, vocab_size)`; writes the KV of all new tokens to storage."""
        where = {"logits_to_keep": batch.logits_indices} if self._takes_logits_to_keep else {}
        output = self._model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            use_cache=False,
            block_metadata=batch.metadata,
            kv_storage=storage,
            **where,
        )
        logits = output.logits[0]
        return logits if self._takes_logits_to_keep else logits[batch.logits_indices]  # (N, vocab_size)

    @torch.no_grad()
    def eager_logits(self, token_ids: list[int]) -> Tensor:
        """The model's own logits of one prompt, `(len(token_ids), vocab_size)` float32: without any cache or table."""
        self._attend_by("eager")
        try:
            tokens = torch.tensor([token_ids], device=self._model.device)
            return self._model(input_ids=tokens, attention_mask=None, use_cache=False).logits[0].float()
        finally:
            self._attend_by(_ATTENTION)

    @torch.no_grad()
    def masks(self, token_ids: list[int]) -> dict[int, tuple[Span, MaskFunction | None]]:
        """What each layer's queries see: the span that we would apply, and the mask function of the model's own.

        Runs the model once, with an attention that only reports.
        """
        report: dict[int, tuple[Span, MaskFunction | None]] = {}
        self._attend_by(_MASK_PROBE)
        try:
            tokens = torch.tensor([token_ids], device=self._model.device)
            self._model(input_ids=tokens, attention_mask=None, use_cache=False, mask_report=report)
        finally:
            self._attend_by(_ATTENTION)
        return report

    def _attend_by(self, name: str) -> None:
        # Set here and not through `set_attn_implementation`, which objects to names that it does not know.
        for config in self._configs:
            config._attn_implementation_internal = name


def _with_shared_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model with modules and configurations of its own, over the same parameters and buffers."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: Any = _ABSENT,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    block_metadata: AttentionMetadata | None = None,
    kv_storage: Storage | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer: `((1, T, H, E), None)`.

    query: (1, H, T, D), key: (1, K, T, D), value: (1, K, T, E). What is not understood raises, since leaving it out
    would give wrong outputs; `load` turns that into a refusal.
    """
    if block_metadata is None or kv_storage is None:
        raise RuntimeError(f"{type(module).__name__} does not hand the keyword arguments of its model to attention")
    if attention_mask is not None or position_bias is not None:
        raise RuntimeError(f"{type(module).__name__} brings a mask or position bias of its own")
    if is_causal is False:
        raise RuntimeError(f"{type(module).__name__} asks for attention that is not causal")
    out = attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        kv_storage,
        _layer_of(module),
        block_metadata,
        scale=scaling,
        span=_span_of(module, sliding_window),
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def _mask_probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: Any = _ABSENT,
    mask_report: dict[int, tuple[Span, Callable[..., Tensor] | None]] | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Reports the layer's span and its model's mask function; attends to nothing, `(1, T, H, E)` zeros."""
    if mask_report is not None:
        function = getattr(attention_mask, "mask_function", None)
        mask_report[_layer_of(module)] = (_span_of(module, sliding_window), function)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _mask_probe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    device: Any = None,
    **unused: Any,
) -> Tensor:
    """A mask that hides nothing and carries the function it would have been made from to the attention function."""
    mask = torch.zeros(batch_size, 1, q_length, kv_length, device=device)
    mask.mask_function = mask_function  # type: ignore[attr-defined]
    return mask


# Names, not state: transformers finds attention functions by name. No mask function goes with the first, which turns
# mask building off: a mask over the flattened tokens would be wrong, and attention masks by position itself.
AttentionInterface.register(_ATTENTION, _block_attention)
AttentionInterface.register(_MASK_PROBE, _mask_probe_attention)
AttentionMaskInterface.register(_MASK_PROBE, _mask_probe_mask)


def _layer_of(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise RuntimeError(f"{type(module).__name__} does not know its layer")
    return layer


def _span_of(module: nn.Module, sliding_window: Any) -> Span:
    """What the layer's queries see: as handed to attention, else as the configuration has it for this layer."""
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    layer_type = layer_types[module.layer_idx] if layer_types else None
    if layer_type == "chunked_attention":
        return Span(chunk=config.attention_chunk_size)
    if sliding_window is _ABSENT:  # some models only tell their masks
        sliding_window = None if layer_type == "full_attention" else getattr(config, "sliding_window", None)
    return Span(window=sliding_window or None)


def _configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every configuration that a module of the model may ask for the name of its attention function."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [
        module.config for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            parts = (getattr(config, name, None) for name in config.sub_configs)
            waiting += [part for part in parts if isinstance(part, PreTrainedConfig)]
    return list(found.values())
