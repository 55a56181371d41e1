"""The truth that production attention is tested against: formulas in float64, one query and one head at a time.

Slow on purpose. Knows nothing of blocks: it is given one request's queries, and all of its keys and values in order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """What attention gives, `(num_queries, num_heads, value_dim)` in float64.

    q: `(num_queries, num_heads, key_dim)`; k: `(context_len, num_kv_heads, key_dim)`, v: likewise with `value_dim`, at
    positions 0, 1, ...; positions: `(num_queries,)`, the queries' own. Heads are grouped: `num_heads` is a multiple of
    `num_kv_heads`, and head h reads KV head `h // (num_heads / num_kv_heads)`. For the query at position p:

        s_j = scale * (q . k_j)                               for each j <= p that window and chunk leave visible
        s_j = softcap * tanh(s_j / softcap)                   where a soft cap is given
        w_j = exp(s_j) / (sum_i exp(s_i) + exp(sink))         the sink: a learned score without a value, one per head
        out = sum_j w_j v_j

    `scale` None means `key_dim ** -0.5`; a window sees (p - window, p], a chunk [p // chunk * chunk, p].
    """
    num_queries, num_heads, key_dim = q.shape
    num_kv_heads, value_dim = v.shape[1:]
    scale = key_dim**-0.5 if scale is None else scale
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty(num_queries, num_heads, value_dim, dtype=torch.float64)
    for query in range(num_queries):
        p = int(positions[query])
        visible = [
            j for j in range(p + 1) if (window is None or j > p - window) and (chunk is None or j >= p // chunk * chunk)
        ]
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = [scale * float(q[query, head] @ k[j, kv_head]) for j in visible]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            weights = [math.exp(score) for score in scores]
            total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head])))
            out[query, head] = sum(
                (weight / total * v[j, kv_head] for weight, j in zip(weights, visible, strict=True)),
                start=torch.zeros(value_dim, dtype=torch.float64),
            )
    return out
