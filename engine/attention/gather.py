"""Attention through block tables, each row for itself: gather the row's slots, or view them, and attend.

Reads exactly the slots that hold a row's tokens and no other, so that what idle slots contain (NaN, Inf, another
request's past) cannot reach a result: a masked score of NaN would still be NaN after the product with a value.

Shapes: T = new tokens of all rows, Q = new tokens of a row, S = keys read for it, H = query heads, K = KV heads,
G = H / K query heads that share a KV head, D = width of a key, E = width of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import AttentionMetadata, Read, Span

from .partial import Pool, row_attention


def attend_by_row(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    scale: float | None,
    span: Span,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """What each new token attends to, `(T, H, E)` in the dtype of `q`, once its K and V are written.

    keys: (num_slots, K, D), values: (num_slots, K, E), by slot; the rest as `attend` takes it.
    """
    num_kv_heads, value_dim = values.shape[1:]
    out = q.new_empty(q.shape[0], q.shape[1], value_dim)  # (T, H, E)
    by_row = out.view(len(out), num_kv_heads, -1, value_dim)  # (T, K, G, E)
    q = q.to(keys.dtype)
    workspace = metadata.workspace
    key_pool, value_pool = Pool.of(keys), Pool.of(values)
    for queries, read, bias in _reads(metadata, span, q, by_row.shape[2]):
        row_out, lse = row_attention(
            q[queries],
            key_pool.take(read.slots, workspace, "keys"),
            value_pool.take(read.slots, workspace, "values"),
            bias,
            is_causal=read.is_causal,
            scale=scale,
            softcap=softcap,
            needs_lse=sinks is not None,
        )  # (Q, K, G, E), (Q, K, G)
        if sinks is not None:
            # A sink is one more score without a value: it takes its share of the softmax.
            assert lse is not None, "it was asked for"
            share = torch.sigmoid(lse - sinks.float().view(lse.shape[1:]))
            row_out = row_out.float() * share[..., None]
        by_row[queries] = row_out
    return out


def _reads(metadata: AttentionMetadata, span: Span, q: Tensor, group: int) -> list[tuple[slice, Read, Tensor | None]]:
    """Each row's queries, what they read, and their mask; made by the step's first layer of a kind for the others."""
    key = "by row", span, q.dtype, group
    found: list[tuple[slice, Read, Tensor | None]] | None = metadata.plans.get(key)
    if found is None:
        found = metadata.plans[key] = [
            (
                slice(row.query_start, row.query_end),
                row.read(span, q.device),
                row.bias(span, q.dtype, q.device, group),
            )
            for row in metadata.rows
        ]
    return found
