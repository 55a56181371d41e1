"""radixkv: the KV cache of a transformer decoder, managed the way an operating system manages memory.

Fixed-size blocks of one pool, a block table per request, and a radix tree over token sequences that finds the longest
cached start of any prompt in one walk. Imports no tensor library; `radixkv.storage` holds the tensors where there are.
"""

from .cache import Allocation, Miss, PrefixCache, PrefixMatch
from .errors import DuplicateRequest, OutOfBlocks, RadixKVError, UnknownRequest
from .eviction import EvictionPolicy
from .stats import CacheStats
from .tokens import TokenKey, namespace_of

__all__ = [
    "Allocation",
    "CacheStats",
    "DuplicateRequest",
    "EvictionPolicy",
    "Miss",
    "OutOfBlocks",
    "PrefixCache",
    "PrefixMatch",
    "RadixKVError",
    "TokenKey",
    "UnknownRequest",
    "namespace_of",
]
__version__ = "0.1.0"
