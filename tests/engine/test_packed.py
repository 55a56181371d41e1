"""Packed linear layers compute what plain ones do, and take their place only where that is so."""

import pytest

torch = pytest.importorskip("torch", reason="models need torch")
pytest.importorskip("transformers", reason="models need transformers")

from torch import nn  # noqa: E402

from engine.models.packed import PackedLinear, can_pack, make_linear, pack_linears  # noqa: E402

DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(not can_pack(torch.empty(1, dtype=dtype)), reason=f"this CPU packs no {dtype}"),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
# Sums of 100 products of size one, in another order or rounded once more at the end.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float16: 0.04}


def layer_of(shape, dtype, *, has_bias=True):
    """A plain layer with weights of size one."""
    torch.manual_seed(sum(shape))
    layer = nn.Linear(shape[1], shape[0], bias=has_bias)
    nn.init.normal_(layer.weight)
    return layer.to(dtype)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 8, 17, 300])
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (96, 64), (33, 100)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_layer_computes_what_the_plain_one_does(dtype, shape, num_rows):
    """One layout serves any number of rows, and sizes that no kernel likes."""
    plain = layer_of(shape, dtype)
    packed = PackedLinear(plain.weight, plain.bias)
    x = torch.randn(num_rows, shape[1]).to(dtype)
    wanted = plain(x)
    torch.testing.assert_close(packed(x), wanted, atol=TOLERANCES[dtype], rtol=0.02)
    torch.testing.assert_close(packed(x[None]), wanted[None], atol=TOLERANCES[dtype], rtol=0.02)
    residual = torch.randn(num_rows, shape[0]).to(dtype)
    before = residual.clone()
    torch.testing.assert_close(packed(x, residual), wanted + residual, atol=TOLERANCES[dtype], rtol=0.02)
    assert torch.equal(residual, before), "the residual is read, not written"


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_loses_nothing_of_the_weight(dtype):
    """Some models read the weight of a layer themselves."""
    plain = layer_of((37, 20), dtype)
    assert torch.equal(PackedLinear(plain.weight, None).weight, plain.weight)


def test_rows_that_are_not_contiguous_are_read_right():
    """The halves of a joined product are views."""
    plain = layer_of((8, 6), torch.float32)
    x = torch.randn(5, 12)[:, 6:]
    torch.testing.assert_close(make_linear(plain.weight, None)(x), x @ plain.weight.T)


def test_only_plain_linear_layers_are_replaced_and_shared_ones_stay_shared():
    """A subclass or a hook does more than multiply; a layer in two places is one layer."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    hooked = nn.Linear(3, 3)
    hooked.register_forward_hook(lambda module, inputs, output: output + 1)
    replaced = nn.Linear(3, 3)
    replaced.forward = lambda x: x
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict(
        {"plain": nn.Linear(3, 3), "scaled": Scaled(3, 3), "hooked": hooked, "replaced": replaced, "first": shared}
    )
    model["second"] = shared
    x = torch.randn(2, 3)
    before = {name: module(x) for name, module in model.items()}
    pack_linears(model)
    kinds = {name: type(module).__name__ for name, module in model.items()}
    assert kinds == {
        "plain": "PackedLinear",
        "scaled": "Scaled",
        "hooked": "Linear",
        "replaced": "Linear",
        "first": "PackedLinear",
        "second": "PackedLinear",
    }
    assert model["first"] is model["second"]
    for name, module in model.items():
        torch.testing.assert_close(module(x), before[name])
