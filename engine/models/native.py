"""`NativeModel`: the decoders of the Llama family in one file, in the order in which a step is computed.

What Llama, SmolLM2, Mistral, Qwen2 and Qwen3 do alike, with their differences as data (biases, norms of queries and
keys, windows, shapes). Beside the unmodified model of transformers it makes fewer and larger operations:

    query, key and value in one product, gate and up in one product, weights packed for the CPU (`packed.py`)
    the residual is added by the product that makes what is added
    queries and keys are rotated together
    in the last layer, what follows attention is computed only for the tokens whose logits are wanted

    token ids ─ embedding ─┬─ norm ─ qkv ─ rotate ─ attend ─ out ─ + ─┬─ norm ─ gate, up ─ down ─ + ─ … ─ norm ─ head
                           └──────────────── residual ──────────────┘ └─────── residual ────────┘

torch.compile was tried for what stands between the products (norm, rotation, gate): half a minute of warm-up, and at 1
to 8 rows each call took two to six times longer than the operations it replaces. It is not used.

Knows nothing of loading and of checks: the weights are those of a model of transformers, whose rotary embedding it
keeps, and `Decoder` compares the two before anyone uses it.

Shapes: T = new tokens of all rows, N = tokens whose logits are wanted, H = query heads, K = KV heads, D = head_dim,
M = hidden size, I = intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm, silu
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from engine.attention import attend
from engine.attention.partial import Storage
from engine.batch import Batch, Span

from .packed import PackedLinear, PlainLinear, is_altered, make_linear, use_huge_pages

_FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


def why_not_native(model: PreTrainedModel) -> str | None:
    """Why `NativeModel` cannot stand for the model, or None if it can."""
    if type(model) not in _FAMILY:
        names = ", ".join(family.__name__ for family in _FAMILY)
        return f"it is a {type(model).__name__}, and the native family is {names}"
    for name, module in model.named_modules():
        if is_altered(module):
            return f"its module {name!r} has hooks or a forward of its own"
        if not type(module).__module__.startswith(("transformers.", "torch.nn.modules.")):
            return f"its module {name!r} is a {type(module).__name__}, which is not of the library"
    if model.config.hidden_act not in ("silu", "swish"):
        return f"its activation is {model.config.hidden_act}"
    return None


@dataclass(frozen=True)
class _Layer:
    """One layer, its members in the order of use."""

    input_norm: Tensor  # (2M,), see `_rms_norm`
    qkv: PackedLinear | PlainLinear  # (T, M) → (T, (H + 2K) * D)
    qk_norm: Tensor | None  # (H + K, D): each head of queries and keys is normed, or none
    span: Span
    scale: float
    out: PackedLinear | PlainLinear  # (T, H * D) → (T, M)
    mlp_norm: Tensor  # (2M,)
    gate_up: PackedLinear | PlainLinear  # (T, M) → (T, 2I)
    down: PackedLinear | PlainLinear  # (T, I) → (T, M)


class NativeModel:
    """A model of the family, with weights of its own.

    spans: what each layer's queries see. takes_weights: the model is taken apart, layer by layer, so that its weights
    are never all in memory twice; it cannot be used any more.
    """

    def __init__(self, model: PreTrainedModel, spans: Mapping[int, Span], *, takes_weights: bool) -> None:
        config = model.config
        self._eps: float = config.rms_norm_eps
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._embedding = model.model.embed_tokens.weight.detach()  # (vocab_size, M)
        self._rotary = model.model.rotary_emb
        # (2D,), see `_rms_norm`: heads are normed without weights, and these come after
        self._head_ones = _doubled(self._embedding.new_ones(model.model.layers[0].self_attn.head_dim))
        self._layers: list[_Layer] = []
        for index, layer in enumerate(model.model.layers):
            self._layers.append(self._layer(layer, spans[index]))
            if takes_weights:
                layer.to("meta")
        self._norm = _doubled(model.model.norm.weight)  # (2M,)
        self._head = make_linear(model.lm_head.weight, model.lm_head.bias)  # (N, M) → (N, vocab_size)
        linears = [linear for layer in self._layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        use_huge_pages([*linears, self._head])

    def _layer(self, layer: nn.Module, span: Span) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qk_norm = None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm.weight] * self._num_heads + [attention.k_norm.weight] * self._num_kv_heads
            qk_norm = torch.stack(norms).detach()
        return _Layer(
            input_norm=_doubled(layer.input_layernorm.weight),
            qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
            qk_norm=qk_norm,
            span=span,
            scale=attention.scaling,
            out=_joined(attention.o_proj),
            mlp_norm=_doubled(layer.post_attention_layernorm.weight),
            gate_up=_joined(mlp.gate_proj, mlp.up_proj),
            down=_joined(mlp.down_proj),
        )

    @torch.no_grad()
    def logits(self, batch: Batch, storage: Storage) -> Tensor:
        """The logits at `batch.logits_indices`, `(N, vocab_size)`; writes the KV of all new tokens to storage."""
        num_heads, num_kv_heads, eps = self._num_heads, self._num_kv_heads, self._eps
        num_rotated = num_heads + num_kv_heads
        hidden = embedding(batch.input_ids[0], self._embedding)  # (T, M)
        cos, sin = self._rotation(hidden, batch.position_ids)  # (T, 1, D)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            x = _rms_norm(hidden, layer.input_norm, eps)
            qkv = layer.qkv(x).view(len(x), num_rotated + num_kv_heads, -1)  # (T, H + 2K, D)
            qk, v = qkv.split((num_rotated, num_kv_heads), dim=1)  # (T, H + K, D), (T, K, D)
            if layer.qk_norm is not None:
                qk = _rms_norm(qk, self._head_ones, eps) * layer.qk_norm
            # Each half of a head is rotated with the other: q * cos + (-second half, first half) * sin; the sign is in
            # sin, and rolling by half a head changes the halves.
            qk = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin)
            attended = attend(
                qk[:, :num_heads],
                qk[:, num_heads:],
                v,
                storage,
                index,
                batch.metadata,
                scale=layer.scale,
                span=layer.span,
            ).flatten(1)  # (T, H * D)
            if index == last:
                attended, hidden = attended[batch.logits_indices], hidden[batch.logits_indices]  # (N, ...)
            hidden = layer.out(attended, hidden)
            x = _rms_norm(hidden, layer.mlp_norm, eps)
            gate, up = layer.gate_up(x).chunk(2, dim=-1)  # (T, I) each
            hidden = layer.down(silu(gate).mul_(up), hidden)
        hidden = _rms_norm(hidden, self._norm, eps)
        return self._head(hidden)

    def _rotation(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of each token's position, `(T, 1, D)`, in the dtype of `hidden`."""
        cos, sin = self._rotary(hidden, position_ids)  # (1, T, D)
        first, second = sin[0].chunk(2, dim=-1)
        return cos[0][:, None], torch.cat([-first, second], dim=-1)[:, None]


# From here on, the memory of the doubled rows costs more than the operations saved.
_FEW_ROWS = 16


def _doubled(weight: Tensor) -> Tensor:
    """A norm's weight (M,) as `_rms_norm` takes it: (2M,), the second half 0."""
    return torch.cat([weight.detach(), torch.zeros_like(weight)])


def _rms_norm(x: Tensor, doubled: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension.

    torch computes it by a dozen operations on a CPU. With few rows each of them has a cost of its own: 61 norms a step,
    4 % of it. A layer norm is one; it takes the mean off, but over x and -x the mean is 0, and the variance is that of
    x. With many rows what counts is how often they are gone through.
    """
    width = x.shape[-1]
    if len(x) <= _FEW_ROWS:
        return layer_norm(torch.cat([x, -x], dim=-1), (2 * width,), doubled, None, eps)[..., :width]
    floats = x.float()
    norm = torch.linalg.vector_norm(floats, dim=-1, keepdim=True)
    return (floats * norm.square_().div_(width).add_(eps).rsqrt_()).to(x.dtype).mul_(doubled[:width])


def _joined(*linears: nn.Linear) -> PackedLinear | PlainLinear:
    """One linear layer whose output is that of all of these, end to end."""
    weight = linears[0].weight if len(linears) == 1 else torch.cat([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return make_linear(weight, None)
    zero = [linear.weight.new_zeros(linear.out_features) for linear in linears]
    return make_linear(weight, torch.cat([b if b is not None else z for b, z in zip(biases, zero, strict=True)]))
