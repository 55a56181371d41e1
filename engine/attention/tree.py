"""`attend`: what models call. Writes the new K and V, then attends by the step's plan: shared nodes once for all rows.

Plans are made by `plan`, in the first layer of a kind; here they are only carried out. For each part one call, its
values and log-sum-exps put on its level; then all levels are merged at once:

    weight of a level = softmax over the levels' log-sum-exps (and the sink, a level without values)
    result = sum over levels of weight * values

Values of parts are merged in float32 whatever the dtype of the model.

Shapes: T = new tokens of all rows, Q = those of a part, L = levels, B = rows attended side by side, H = query heads,
K = KV heads, G = H / K, D = width of a key, E = width of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import AttentionMetadata, Span

from .gather import attend_by_row
from .partial import Pool, Storage, padded_attention, row_attention
from .plan import Plan, Shape, make_plan


def attend(
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
    other's new tokens through shared blocks, because all of them are written before any row reads. Only slots that hold
    a row's tokens are read. The ways to attend agree up to the rounding of sums in another order.
    """
    storage.write(layer, metadata.slot_mapping, k, v)
    keys, values = storage.keys(layer), storage.values(layer)
    plan = plan_for(q, keys, values, metadata, span)
    if plan is None:
        return attend_by_row(q, keys, values, metadata, scale, span, softcap, sinks)
    return _carry_out(plan, q, keys, values, metadata, scale, softcap, sinks)


def plan_for(q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, span: Span) -> Plan | None:
    """The step's plan for layers of this kind: made for the first of them, kept for the others."""
    shape = Shape(q.shape[1], keys.shape[1], keys.shape[2], values.shape[2], keys.dtype, q.device)
    key = span, shape
    if key not in metadata.plans:
        metadata.plans[key] = make_plan(metadata, span, shape)
    plan: Plan | None = metadata.plans[key]
    return plan


class Levels:
    """Room for the results of a plan's parts, with a view for each part of where its results go.

    Layers of one kind write the same places, so a query without a part on a level keeps what it was given here: values
    of 0 with a log-sum-exp of -inf.
    """

    def __init__(self, plan: Plan, num_tokens: int, num_heads: int, num_kv_heads: int, value_dim: int, q: Tensor):
        shape = plan.num_levels, num_tokens, num_heads
        self.values = torch.zeros(*shape, value_dim, device=q.device)  # (L, T, H, E) float32
        self.lse = torch.full(shape, float("-inf"), device=q.device)  # (L, T, H)
        values = self.values.view(plan.num_levels, num_tokens, num_kv_heads, -1, value_dim)
        lse = self.lse.view(plan.num_levels, num_tokens, num_kv_heads, -1)
        self.of_parts = [
            (values[part.level, part.tokens], lse[part.level, part.tokens]) for part in plan.parts
        ]  # (Q, K, G, E), (Q, K, G)
        self.of_padded: tuple[Tensor, Tensor] | None = None  # (B, K, G, E), (B, K, G)
        if plan.padded is not None and isinstance(plan.padded.tokens, slice):
            self.of_padded = values[plan.padded.level, plan.padded.tokens], lse[plan.padded.level, plan.padded.tokens]

    def merged(self, sinks: Tensor | None) -> Tensor:
        """(T, H, E): the levels' values, each with its share of the softmax over the log-sum-exps."""
        lse = self.lse if sinks is None else torch.cat([self.lse, sinks.float().expand(1, *self.lse.shape[1:])])
        weights = lse.softmax(0)[..., None]  # (L, T, H, 1)
        out = self.values[0] * weights[0]
        for level in range(1, len(self.values)):
            out.addcmul_(self.values[level], weights[level])
        return out


def _carry_out(
    plan: Plan,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    num_tokens, num_heads, _ = q.shape
    num_kv_heads, value_dim = values.shape[1:]
    workspace = metadata.workspace
    dtype = q.dtype
    q = q.to(keys.dtype)
    levels: Levels | None = None
    if plan.num_levels > 1 or sinks is not None:
        if plan.levels is None:
            plan.levels = Levels(plan, num_tokens, num_heads, num_kv_heads, value_dim, q)
        levels = plan.levels
    else:
        out = q.new_empty(num_tokens, num_heads, value_dim, dtype=dtype)  # (T, H, E)
        by_token = out.view(num_tokens, num_kv_heads, -1, value_dim)  # (T, K, G, E)
    key_pool, value_pool = Pool.of(keys), Pool.of(values)

    for index, part in enumerate(plan.parts):
        part_out, part_lse = row_attention(
            q[part.tokens],
            key_pool.take(part.read.slots, workspace, "keys"),
            value_pool.take(part.read.slots, workspace, "values"),
            part.bias,
            is_causal=part.read.is_causal,
            scale=scale,
            softcap=softcap,
            needs_lse=levels is not None,
        )  # (Q, K, G, E), (Q, K, G)
        if levels is None:
            by_token[part.tokens] = part_out
        else:
            values_here, lse_here = levels.of_parts[index]
            values_here.copy_(part_out)
            lse_here.copy_(part_lse)

    padded = plan.padded
    if padded is not None:
        padded_out, padded_lse = padded_attention(
            q[padded.tokens],
            key_pool.take(padded.slots, workspace, "keys"),
            value_pool.take(padded.slots, workspace, "values"),
            padded.bias,
            scale=scale,
            softcap=softcap,
        )  # (B, K, G, E), (B, K, G)
        if levels is None:
            by_token[padded.tokens] = padded_out
        elif levels.of_padded is not None:
            values_here, lse_here = levels.of_padded
            values_here.copy_(padded_out)
            lse_here.copy_(padded_lse)
        else:
            levels.values[padded.level, padded.tokens] = padded_out.flatten(1, 2).float()
            levels.lse[padded.level, padded.tokens] = padded_lse.flatten(1, 2)
    return out if levels is None else levels.merged(sinks).to(dtype)
