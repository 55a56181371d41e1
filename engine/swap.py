"""KV of preempted requests in host memory. Knows blocks and bytes, and nothing of requests but their ids."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from radixkv.storage import KVStorage


class HostSwap:
    """Copies blocks out of a storage and back, bit for bit, into whatever blocks the request has then."""

    def __init__(self, storage: KVStorage) -> None:
        self.storage = storage
        self._saved: dict[str, list[Tensor]] = {}

    @property
    def size_bytes(self) -> int:
        """The bytes that are kept now."""
        return sum(tensor.nbytes for saved in self._saved.values() for tensor in saved)

    def save(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Copies these blocks out, in this order."""
        self._saved[request_id] = self.storage.read_blocks(block_ids)

    def restore(self, request_id: str, first: int, block_ids: Sequence[int]) -> None:
        """Copies what was saved from place `first` on back, to these blocks; it stays saved until `drop`."""
        saved = [tensor[:, first : first + len(block_ids)] for tensor in self._saved[request_id]]
        self.storage.write_blocks(block_ids, saved)

    def drop(self, request_id: str) -> None:
        """Forgets what was saved."""
        del self._saved[request_id]
