"""Attention of some queries to a part of what they see, in a form that can be merged with other parts.

A part gives its softmax-weighted values and the log of the sum of its exponentials (log-sum-exp). With both, parts are
merged exactly, whatever keys went to which: the weight of a part is the softmax over the parts' log-sum-exps.

On a CPU, plain attention runs as the fused operation that torch's scaled-dot-product attention is made of, since that
one also returns the log-sum-exp. A soft cap, values of another width than keys, and other devices take the formula.

Shapes: Q = queries of a row or node, S = keys of a part, H = query heads, K = KV heads, G = H / K query heads that
share a KV head, D = width of a key, E = width of a value, B = rows that are attended side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# The formula keeps all scores of a piece in memory. 2**24 float32 scores are 64 MiB: small beside a model, and large
# enough that the products dominate.
_MAX_SCORES = 2**24
_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_fused = torch._scaled_dot_product_flash_attention_for_cpu
# Below this many numbers, fresh tensors come from memory that is in use already; the pages of larger ones may come anew
# each time, which costs more than the copy: 52 ms instead of 3 for 8 rows of 1,024 keys (8 KV heads of 128, float32).
_LARGE = 2**18


class Storage(Protocol):
    """What attention asks of `radixkv.storage.KVStorage`."""

    def keys(self, layer: int) -> Tensor:
        """(num_slots, K, D): the keys of a layer, by slot."""

    def values(self, layer: int) -> Tensor:
        """(num_slots, K, E): the values of a layer, by slot."""

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Puts k (T, K, D) and v (T, K, E) into their slots (T,)."""


class Pool(NamedTuple):
    """The keys or values of a layer, twice the same memory: as they lie, and as attention takes them."""

    by_slot: Tensor
    """(num_slots, K, D)"""
    by_kv_head: Tensor
    """(1, K, num_slots, D)"""

    @classmethod
    def of(cls, by_slot: Tensor) -> Pool:
        """The pool of a layer's keys or values by slot."""
        return cls(by_slot, by_slot.transpose(0, 1).unsqueeze(0))

    def take(self, slots: slice | Tensor, workspace: dict[Any, Tensor], name: str) -> Tensor:
        """Those of some slots, (1, K, S, D): a view for a slice; others are gathered token-major, as they lie.

        Large ones are good until the next under the same name: they share their room in the workspace.
        """
        if isinstance(slots, slice):
            return self.by_kv_head[:, :, slots]
        pool = self.by_slot
        num_slots = len(slots)
        if num_slots * pool.stride(0) < _LARGE:
            return pool.index_select(0, slots).transpose(0, 1).unsqueeze(0)
        key = name, pool.dtype, pool.shape[1:]
        room = workspace.get(key)
        if room is None or len(room) < num_slots:
            # A normal tensor even where a step runs in inference mode: it must take later steps' keys, whatever mode.
            with torch.inference_mode(False):
                room = workspace[key] = pool.new_empty(2 * num_slots, *pool.shape[1:])
        return torch.index_select(pool, 0, slots, out=room[:num_slots]).transpose(0, 1).unsqueeze(0)


def row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    needs_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The part's values (Q, K, G, E) and its log-sum-exps (Q, K, G) float32.

    q: (Q, H, D); k: (1, K, S, D); v: (1, K, S, E), read with whatever strides they have. bias: (Q, S), or (Q * G, S)
    with each query's repeated for its group, to add to the scores. Where `needs_lse` is false the second may be None.
    """
    num_queries, num_heads, key_dim = q.shape
    _, num_kv_heads, _, value_dim = v.shape
    group = num_heads // num_kv_heads
    q = q.view(num_queries, num_kv_heads, group, key_dim)
    is_fused = softcap is None and (_is_fused(q, v) or not needs_lse)
    # The query heads of one KV head become its queries: K and V are read once for all of them. With bfloat16 on a CPU
    # this is five times faster than the same with the heads expanded (32 heads on 8, 1,024 keys).
    if num_queries == 1 and is_fused:
        return _call(q, k, v, bias, False, scale)  # (1, K, G, E), (1, K, G)
    is_repeated = bias is not None and len(bias) == num_queries * group
    if is_fused and not is_repeated and (bias is not None or is_causal):
        # KV heads stand on the batch axis and are expanded over their group with stride 0: nothing is copied.
        k, v = (pool[0, :, None].expand(-1, group, -1, -1) for pool in (k, v))  # (K, G, S, D), (K, G, S, E)
        out, lse = _call(q.permute(1, 2, 0, 3), k, v, bias, is_causal, scale)  # (K, G, Q, E), (K, G, Q)
        return out.permute(2, 0, 1, 3), None if lse is None else lse.permute(2, 0, 1)
    q = q.transpose(0, 1).reshape(1, num_kv_heads, num_queries * group, key_dim)  # (1, K, Q * G, D)
    if is_fused:
        out, lse = _call(q, k, v, bias, False, scale)
    else:
        out, lse = _formula(q, k, v, bias, is_causal, scale, softcap, repeat=1 if is_repeated else group)
    out = out.view(num_kv_heads, num_queries, group, value_dim).transpose(0, 1)
    return out, None if lse is None else lse.view(num_kv_heads, num_queries, group).transpose(0, 1)


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One query for each of B rows with keys of its own: values (B, K, G, E), log-sum-exps (B, K, G) float32.

    q: (B, H, D); k: (1, K, B * S, D); v: (1, K, B * S, E), each row's padded to one length with slots that hold
    numbers; bias: (B, 1, 1, S), -inf for the padding.
    """
    num_rows = len(q)
    _, num_kv_heads, num_keys, _ = k.shape
    q = q.view(num_rows, num_kv_heads, -1, q.shape[2])  # (B, K, G, D)
    k, v = (
        pool[0].unflatten(1, (num_rows, num_keys // num_rows)).transpose(0, 1) for pool in (k, v)
    )  # (B, K, S, D), (B, K, S, E)
    if softcap is None and _is_fused(q, v):
        return _fused(q, k, v, attn_mask=bias, scale=scale)
    return _formula(q, k, v, bias, False, scale, softcap, repeat=q.shape[2])


def _is_fused(q: Tensor, v: Tensor) -> bool:
    return q.is_cpu and q.shape[-1] == v.shape[-1] and q.dtype in _FUSED_DTYPES


def _call(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor | None]:
    if _is_fused(q, v):
        return _fused(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
    return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale), None


def _formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
    softcap: float | None,
    repeat: int,
) -> tuple[Tensor, Tensor]:
    """Values (B, K, N, E) and log-sum-exps (B, K, N) of q (B, K, N, D), by the formula.

    repeat: how many neighbours on N share a row of the bias, (N / repeat, S) or (B, 1, N / repeat, S); with
    `is_causal` they stand at one position.
    """
    num_batches, num_kv_heads, num_queries, key_dim = q.shape
    context_len = k.shape[2]
    scale = key_dim**-0.5 if scale is None else scale
    out = q.new_empty(num_batches, num_kv_heads, num_queries, v.shape[3])
    lse = q.new_empty(num_batches, num_kv_heads, num_queries, dtype=torch.float32)
    k = k.transpose(2, 3)  # (B, K, D, S)
    step = max(1, _MAX_SCORES // (num_batches * num_kv_heads * context_len * repeat))
    for first in range(0, num_queries // repeat, step):
        piece = slice(first * repeat, (first + step) * repeat)
        scores = (q[:, :, piece] @ k).float() * scale  # (B, K, n, S)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores += bias[..., first : first + step, :].float().repeat_interleave(repeat, dim=-2)
        if is_causal:
            queries = torch.arange(first * repeat, first * repeat + scores.shape[2], device=q.device) // repeat
            hidden = torch.arange(context_len, device=q.device) > queries[:, None]
            scores.masked_fill_(hidden, float("-inf"))
        total = scores.logsumexp(-1, keepdim=True)  # (B, K, n, 1)
        lse[:, :, piece] = total[..., 0]
        out[:, :, piece] = (scores - total).exp_().to(v.dtype) @ v
    return out, lse
