"""Attention through block tables with stock torch: write the new K and V, gather each row's slots, attend.

Reads exactly the slots that hold a row's tokens and no other, so that what idle slots contain (NaN, Inf, another
request's past) cannot reach a result: a masked score of NaN would still be NaN after the product with a value.

Shapes: T = new tokens of all rows, Q = new tokens of a row, S = keys read for it, H = query heads, K = KV heads,
G = H / K query heads that share a KV head, D = width of a key, E = width of a value.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.batch import AttentionMetadata, RowMetadata, Span

# The explicit formula keeps all scores of a piece in memory. 2**24 float32 scores are 64 MiB: small beside a model, and
# large enough that the products dominate.
_MAX_SCORES = 2**24


class Storage(Protocol):
    """What attention asks of `radixkv.storage.KVStorage`."""

    def keys(self, layer: int) -> Tensor:
        """(num_slots, K, D): the keys of a layer, by slot."""

    def values(self, layer: int) -> Tensor:
        """(num_slots, K, E): the values of a layer, by slot."""

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Puts k (T, K, D) and v (T, K, E) into their slots (T,)."""


def gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    storage: Storage,
    layer: int,
    metadata: AttentionMetadata,
    *,
    scale: float | None = None,
    span: Span = Span(),  # noqa: B008 - immutable
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What each new token attends to, `(T, H, E)` in the dtype of `q`; writes the new K and V on the way.

    q: `(T, H, D)`; k: `(T, K, D)`; v: `(T, K, E)`; sinks: `(H,)`. `scale` None means `D ** -0.5`. Rows may read each
    other's new tokens through shared blocks, because all of them are written before any row reads.
    """
    storage.write(layer, metadata.slot_mapping, k, v)
    keys, values = storage.keys(layer), storage.values(layer)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])  # (T, H, E)
    q = q.to(keys.dtype)
    for row in metadata.rows:
        slots = row.read(span, q.device).slots
        if isinstance(slots, slice):
            row_keys, row_values = keys[slots], values[slots]  # (S, K, D), (S, K, E): views
        else:
            row_keys, row_values = keys.index_select(0, slots), values.index_select(0, slots)
        row_q = q[row.query_start : row.query_end]  # (Q, H, D)
        if softcap is None and sinks is None:
            row_out = _attend(row_q, row_keys, row_values, row, span, scale)
        else:
            row_out = _attend_explicitly(row_q, row_keys, row_values, row, span, scale, softcap, sinks)
        out[row.query_start : row.query_end] = row_out
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, row: RowMetadata, span: Span, scale: float | None) -> Tensor:
    """(Q, H, E) by scaled-dot-product attention."""
    num_queries, num_heads, _ = q.shape
    num_kv_heads = k.shape[1]
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # (K, S, D), (K, S, E): strided, no copy
    if num_queries == 1:
        # The query heads of one KV head become its queries: K and V are read once for all of them. With bfloat16 on a
        # CPU this is five times faster than the same with the heads expanded (32 heads on 8, 1,024 keys).
        q = q.reshape(1, num_kv_heads, -1, q.shape[-1])  # (1, K, G, D)
        return scaled_dot_product_attention(q, k[None], v[None], scale=scale).reshape(1, num_heads, -1)
    group = num_heads // num_kv_heads
    q = q.transpose(0, 1).reshape(num_kv_heads, group, num_queries, -1)  # (K, G, Q, D)
    # KV heads stand on the batch axis and are expanded over their group with stride 0: nothing is copied.
    k = k[:, None].expand(-1, group, -1, -1)  # (K, G, S, D)
    v = v[:, None].expand(-1, group, -1, -1)
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=row.bias(span, q.dtype, q.device),
        is_causal=row.read(span, q.device).is_causal,
        scale=scale,
    )  # (K, G, Q, E)
    return out.reshape(num_heads, num_queries, -1).transpose(0, 1)


def _attend_explicitly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: RowMetadata,
    span: Span,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """(Q, H, E) with what scaled-dot-product attention does not offer: a soft cap on scores, and sinks."""
    num_queries, num_heads, key_dim = q.shape
    context_len, num_kv_heads, value_dim = v.shape
    scale = key_dim**-0.5 if scale is None else scale
    group = num_heads // num_kv_heads
    q = q.transpose(0, 1).reshape(num_kv_heads, group, num_queries, key_dim)  # (K, G, Q, D)
    k = k.permute(1, 2, 0)[:, None]  # (K, 1, D, S)
    v = v.transpose(0, 1)[:, None]  # (K, 1, S, E)
    bias = row.bias(span, torch.float32, q.device)
    if bias is None and num_queries > 1:
        bias = torch.full((num_queries, context_len), float("-inf"), device=q.device).triu(1)  # read.is_causal
    out = q.new_empty(num_kv_heads, group, num_queries, value_dim)
    step = max(1, _MAX_SCORES // (num_heads * context_len))
    for first in range(0, num_queries, step):
        piece = slice(first, first + step)
        scores = (q[:, :, piece] @ k).float() * scale  # (K, G, Q, S)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores += bias[piece]
        if sinks is not None:
            sink = sinks.float().view(num_kv_heads, group, 1, 1).expand(-1, -1, scores.shape[2], 1)
            # One more score that takes its share of the softmax and has no value.
            weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out[:, :, piece] = weights.to(v.dtype) @ v
    return out.reshape(num_heads, num_queries, value_dim).transpose(0, 1)
