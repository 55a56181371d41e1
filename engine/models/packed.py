"""Linear layers whose weights are laid out once for the CPU's matrix kernels (oneDNN), instead of at every call.

A decode step multiplies a few rows with every weight of the model, so it is bound by how fast weights are read.
`torch.nn.functional.linear` keeps them row by row; oneDNN then reads them in an order that is not the memory's, or
copies them first. Measured on one core of a server with AVX-512 and AMX, weights out of cache, µs, plain → packed:

    weight (out × in)     float32, 1 row  float32, 8 rows  bfloat16, 1 row  bfloat16, 8 rows  bfloat16, 256 rows
    qkv     960 ×  576         259 →  265       502 →   375        211 → 124        222 → 124          450 →   306
    gate-up 3072 × 576         788 →  726     1,868 → 1,032        541 → 371        569 → 375        2,446 → 1,942
    down    576 × 1536         316 →  322       682 →   438        285 → 187        272 → 179          685 →   566
    head  49152 ×  576      10,121 → 9,151   34,948 → 12,798     7,363 → 4,779      8,196 → 5,143

No shape lost more than 7 % (gate-up with 1,024 rows in float32), so everything is packed and nothing kept beside it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from radixkv.huge_pages import advise_mappings_of

# The number of rows that the layout is chosen for. From 4 to 512 the choice made no difference to any number of rows;
# with 1, float32 was laid out for a kernel that is twice slower at 8 rows.
_ROWS = 16
# It takes half a second for 300 MB, and a model that fits the processor's cache gains nothing.
_WORTH_HUGE_PAGES = 2**25  # bytes


def can_pack(weight: Tensor) -> bool:
    """Whether this machine's kernels take packed weights of that dtype; on a CPU only."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32:
        return True
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` as `torch.nn.Linear` computes it, with the weight packed.

    weight: `(out_features, in_features)`, of a dtype that `can_pack` allows; it is copied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)

    @property
    def weight(self) -> Tensor:
        """The weight as it was given, `(out_features, in_features)`: unpacked anew at each call."""
        return self._packed.to_dense()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`(..., out_features)` for x `(..., in_features)`; a residual of the result's shape is added in one go."""
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")


class PlainLinear(nn.Module):
    """The same where nothing can be packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`(..., out_features)` for x `(..., in_features)`, plus the residual."""
        out = linear(x, self.weight, self.bias)
        return out if residual is None else out.add_(residual)


def make_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear | PlainLinear:
    """A linear layer, packed where this machine can."""
    return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)


def pack_linears(model: nn.Module) -> None:
    """Replaces the linear layers of a model by packed ones, each as soon as it is packed, so that the memory of a model
    that nobody else holds grows by one layer at most.

    Left alone are layers that are more than `torch.nn.Linear` (a subclass, hooks, a forward of their own).
    """
    packed: dict[int, PackedLinear] = {}  # what stands in two places stays one
    # Names, not modules, are held here: a layer is gone as soon as it is replaced.
    for name in [name for name, _ in model.named_modules(remove_duplicate=False)]:
        layer = model.get_submodule(name)
        if is_plain_linear(layer) and can_pack(layer.weight):
            if id(layer) not in packed:
                packed[id(layer)] = PackedLinear(layer.weight, layer.bias)
            model.set_submodule(name, packed[id(layer)])
    use_huge_pages(packed.values())


def use_huge_pages(linears: Iterable[nn.Module]) -> None:
    """Asks for huge pages under the weights of packed layers, where there are enough of them; see `huge_pages`."""
    packed = [linear._packed for linear in linears if isinstance(linear, PackedLinear)]
    if sum(torch.ops.mkldnn._nbytes(weight) for weight in packed) >= _WORTH_HUGE_PAGES:
        advise_mappings_of(torch.ops.mkldnn.data_ptr(weight) for weight in packed)


def is_plain_linear(module: nn.Module) -> bool:
    """The module is `torch.nn.Linear` and nothing has been added to it."""
    return type(module) is nn.Linear and not is_altered(module)


def is_altered(module: nn.Module) -> bool:
    """Someone has added hooks to the module, or put another forward in its place."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return "forward" in vars(module) or any(hooks)
