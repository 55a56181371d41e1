"""The tensors behind the blocks: `KVStorage` owns one flat buffer of keys and values, for all layers.

It knows slots and layers, and nothing of requests, tokens or the tree: who may write a block is decided by its callers.
This is the one module of `radixkv` that imports torch, so it is imported by name and never by `import radixkv`.

Invariants: the keys of all layers stand first, then the values of all layers; within a layer, slots ascend. A slot
holds whatever was last written to it, and nothing is cleared when a block is freed, so readers must read exactly the
slots that were written.

Shapes: S = num_blocks * block_size slots, H = KV heads of a layer, D = width of a head, T = tokens written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .huge_pages import advise_range


class LayerShape(NamedTuple):
    """How many KV heads a layer keeps per token, and how wide their keys and values are."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class KVStorage:
    """Room for the keys and values of `num_blocks` blocks of `block_size` tokens, allocated once.

        buffer: | keys 0 | keys 1 | ... | keys L-1 | values 0 | values 1 | ... | values L-1 |

    With layers all alike this is the tensor `(2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)`; layers
    may differ all the same, and a view of one layer looks alike in both cases.

    Memory is not initialised: idle slots may hold anything, NaN included.

    Raises `ValueError` for sizes below one or no layers, `TypeError` for a dtype that is not floating point.

    >>> storage = KVStorage(num_blocks=4, block_size=2, layers=[LayerShape(1, 8, 8)] * 3)
    >>> storage.keys(0).shape
    torch.Size([8, 1, 8])
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[LayerShape],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, count in (("num_blocks", num_blocks), ("block_size", block_size)):
            if count < 1:
                raise ValueError(f"{name}={count}: a positive number is needed")
        self.bytes_per_block = self.bytes_per_block_of(layers, block_size, dtype)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = tuple(LayerShape(*shape) for shape in layers)
        self.dtype = dtype
        num_slots = num_blocks * block_size

        # Not zeroed: that would touch every page of memory at start, and correct readers cannot tell the difference.
        self._buffer = torch.empty(self.size_bytes // dtype.itemsize, dtype=dtype, device=device)
        self.device = self._buffer.device
        if self.device.type == "cpu":
            advise_range(self._buffer.data_ptr(), self.size_bytes)

        shapes = [(shape.num_kv_heads, shape.key_dim) for shape in self.layers]
        shapes += [(shape.num_kv_heads, shape.value_dim) for shape in self.layers]
        # Neighbours of one shape form a panel (n, num_blocks, block_size, H, D), copied in one operation: one panel for
        # a plain decoder, two where values are wider or narrower than keys.
        self._panels: list[Tensor] = []
        views: list[Tensor] = []
        offset = 0
        for (num_heads, dim), group in groupby(shapes):
            count = sum(1 for _ in group)
            size = count * num_slots * num_heads * dim
            panel = self._buffer[offset : offset + size].view(count, num_blocks, block_size, num_heads, dim)
            self._panels.append(panel)
            views += panel.view(count, num_slots, num_heads, dim).unbind(0)
            offset += size
        self._keys = tuple(views[: len(self.layers)])
        self._values = tuple(views[len(self.layers) :])

    @staticmethod
    def bytes_per_block_of(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        """The bytes that one block takes over all layers, K and V; what a memory budget is divided by."""
        if not dtype.is_floating_point:
            raise TypeError(f"dtype={dtype}: keys and values need a floating-point type")
        if not layers:
            raise ValueError("layers is empty: at least one layer is needed")
        for layer, shape in enumerate(layers):
            if len(shape) != 3 or min(shape) < 1:
                raise ValueError(
                    f"layer {layer} has shape {tuple(shape)}: (num_kv_heads, key_dim, value_dim), each >= 1"
                )
        return sum(heads * (key + value) for heads, key, value in layers) * block_size * dtype.itemsize

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def num_slots(self) -> int:
        """The number of token slots, `num_blocks * block_size`."""
        return self.num_blocks * self.block_size

    @property
    def size_bytes(self) -> int:
        """The bytes of the whole buffer."""
        return self.num_blocks * self.bytes_per_block

    @property
    def data(self) -> Tensor:
        """The pool as `(2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)`: K then V, a view.

        Raises `ValueError` where layers differ, or keys are not as wide as values: then there is no such tensor.
        """
        if len(self._panels) != 1:
            raise ValueError(
                f"the layers are not all alike ({sorted(set(self.layers))}): use keys(layer), values(layer)"
            )
        return self._panels[0].view(2, self.num_layers, *self._panels[0].shape[1:])

    def keys(self, layer: int) -> Tensor:
        """The keys of one layer, `(num_slots, num_kv_heads, key_dim)`: a view, indexed by slot."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """The values of one layer, `(num_slots, num_kv_heads, value_dim)`: a view, indexed by slot."""
        return self._values[layer]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Puts the keys and values of T tokens into their slots of one layer.

        slots: `(T,)` int64, each slot once; k: `(T, num_kv_heads, key_dim)`; v: `(T, num_kv_heads, value_dim)`. Other
        dtypes are cast to the storage's. Raises `ValueError` for other shapes (a broadcast would silently write one
        token's keys to many), `IndexError` for a slot outside the pool.
        """
        keys, values = self._keys[layer], self._values[layer]
        for name, given, pool in (("k", k, keys), ("v", v, values)):
            if given.shape != (len(slots), *pool.shape[1:]):
                wanted = (len(slots), *pool.shape[1:])
                raise ValueError(f"{name} has shape {tuple(given.shape)}: layer {layer} needs {wanted}")
        keys.index_copy_(0, slots, k.to(self.dtype))
        values.index_copy_(0, slots, v.to(self.dtype))

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the leading `num_tokens` slots of a block to another, K and V of all layers.

        Serves copy-on-write (a whole block) and hits that end inside a block. The target's other slots stay as they
        are. Raises `ValueError` for an unknown block, and for `num_tokens` outside [0, block_size]. Costs one strided
        copy for each run of equal layers.
        """
        for name, block_id in (("source", source), ("target", target)):
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"{name}={block_id}: a block id in [0, {self.num_blocks}) is needed")
        if not 0 <= num_tokens <= self.block_size:
            raise ValueError(f"num_tokens={num_tokens}: a number in [0, {self.block_size}] is needed")
        if source == target or num_tokens == 0:
            return
        for panel in self._panels:
            panel[:, target, :num_tokens] = panel[:, source, :num_tokens]

    def read_blocks(self, block_ids: Sequence[int]) -> list[Tensor]:
        """A copy of some blocks in host memory, K and V of all layers, for `write_blocks` to put back.

        One tensor for each run of equal layers, `(layers, len(block_ids), block_size, num_kv_heads, head_dim)`.
        Raises `ValueError` for an unknown block.
        """
        index = self._index(block_ids)
        return [panel.index_select(1, index).cpu() for panel in self._panels]

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Tensor]) -> None:
        """Puts what `read_blocks` gave into blocks, which may be others than it was read from; bit for bit.

        Raises `ValueError`, with nothing written, for an unknown block, or data of other shapes.
        """
        index = self._index(block_ids)
        wanted = [(panel.shape[0], len(block_ids), *panel.shape[2:]) for panel in self._panels]
        given = [tuple(tensor.shape) for tensor in data]
        if given != wanted:
            raise ValueError(f"data has shapes {given}: {len(block_ids)} blocks of this storage need {wanted}")
        for panel, tensor in zip(self._panels, data, strict=True):
            panel.index_copy_(1, index, tensor.to(self.device))

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"block id {block_id}: a block id in [0, {self.num_blocks}) is needed")
        return torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)

    def check(self) -> None:
        """Recounts the layout; an AssertionError says in one sentence what is broken."""
        expected = self._buffer.data_ptr()
        for kind, views, dims in (
            ("keys", self._keys, [shape.key_dim for shape in self.layers]),
            ("values", self._values, [shape.value_dim for shape in self.layers]),
        ):
            for layer, (view, dim) in enumerate(zip(views, dims, strict=True)):
                shape = (self.num_slots, self.layers[layer].num_kv_heads, dim)
                assert view.shape == shape, f"{kind} of layer {layer} have shape {tuple(view.shape)}, not {shape}"
                assert view.is_contiguous(), f"{kind} of layer {layer} are not contiguous"
                assert view.data_ptr() == expected, f"{kind} of layer {layer} do not start where their neighbour ends"
                expected += view.numel() * view.element_size()
        assert expected == self._buffer.data_ptr() + self.size_bytes, f"the views do not fill {self.size_bytes} bytes"

    def show(self) -> str:
        """The storage in a few lines: sizes, and each run of equal layers."""
        lines = [
            f"KVStorage: {self.num_blocks} blocks x {self.block_size} tokens, {self.num_layers} layers, "
            f"{self.dtype}, {self.device}: {self.size_bytes / 2**20:.1f} MiB, {self.bytes_per_block} bytes a block"
        ]
        first = 0
        for shape, group in groupby(self.layers):
            count = sum(1 for _ in group)
            lines.append(
                f"  layers [{first}, {first + count}): {shape.num_kv_heads} KV heads, "
                f"keys {shape.key_dim} wide, values {shape.value_dim} wide"
            )
            first += count
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self.show().splitlines()[0]}>"
