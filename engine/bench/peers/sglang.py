"""SGLang's prefix trees, without the rest of SGLang. Tried with SGLang 0.5.23.

Importing SGLang as a whole wants a GPU build with dozens of packages. The trees need a few of its modules: those are
loaded from the package as it is, and every other module that they name is replaced by an inert stand-in. Needs torch
and msgspec. A run that used the trees wrongly would fail, because each match is checked against what was stored.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from importlib import abc, import_module, machinery, util
from pathlib import Path
from types import ModuleType
from typing import Any

_MEM_CACHE = "sglang.srt.mem_cache."
_REAL = (
    *(
        _MEM_CACHE + name
        for name in (
            "radix_cache",
            "evict_policy",
            "base_prefix_cache",
            "cache_init_params",
            "events",
            "utils",
            "cpp_utils",
            "unified_cache",
            "unified_radix_cache",
            "rust_tree_core",
            "hicache_storage",
        )
    ),
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.rust_extensions",
    "sglang.srt.environ",
)
# Packages whose own `__init__` would import everything: only their directories count.
_BARE_PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.disaggregation")
_STANDINS = ("sglang", "triton", "zmq")


class _Inert:
    """Anything that may be called or asked for an attribute, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inert()


class _Standin(ModuleType):
    """A module in which every name exists: a class if it looks like one, else something inert."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # a package, so that its submodules are asked for too

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {"__init__": lambda self, *args, **kwargs: None}) if name[:1].isupper() else _Inert()
        setattr(self, name, value)
        return value


class _Finder(abc.MetaPathFinder, abc.Loader):
    """Loads the trees' modules from `directory` and stand-ins for the rest."""

    def __init__(self, directory: Path, names: dict[str, dict[str, Any]]) -> None:
        self._directory = directory
        self._names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> machinery.ModuleSpec | None:
        """How to load `fullname`; None leaves it to Python."""
        if fullname in _BARE_PACKAGES:
            spec = machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [str(self._directory.joinpath(*fullname.split(".")))]
            return spec
        if any(fullname == real or fullname.startswith(real + ".") for real in _REAL):
            return None
        if fullname.partition(".")[0] in _STANDINS:
            return machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: machinery.ModuleSpec) -> ModuleType:
        """An empty stand-in."""
        return _Standin(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Puts in the few names that must do what they say."""
        for name, value in self._names.get(module.__name__, {}).items():
            setattr(module, name, value)


class _FreedSlots:
    """What the trees take for their allocator: remembers the slots that they free."""

    device = "cpu"
    size = 1 << 40

    def __init__(self) -> None:
        self._freed: list[Any] = []

    def free(self, slots: Any) -> None:
        """Remembers them."""
        self._freed.append(slots)

    def free_segment(self, slots: Any, *, start_pos: int = 0) -> None:
        """Remembers them."""
        self._freed.append(slots)

    def available_size(self) -> int:
        """None: the benchmark evicts by itself."""
        return 0

    def get_kvcache(self) -> None:
        """There are no tensors."""

    def take(self) -> list[Any]:
        """What was freed since the last call."""
        freed, self._freed = self._freed, []
        return freed


def _decorate_nothing(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda function: function


def _assert_int64_array(values: Any, name: str) -> None:
    assert isinstance(values, array) and values.typecode == "q", f"{name} must be an array of int64"


def _install(directory: Path) -> None:
    """Makes the trees importable, once a process."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    helpers: dict[str, Any] = {
        "ceil_align": lambda number, step: -(-number // step) * step,
        "assert_int64_array": _assert_int64_array,
    }
    streaming = type(
        "StreamingSession",
        (),
        {
            "__init__": lambda self, cache: setattr(self, "slots", {}),
            "try_match_prefix": lambda self, params: None,
            "reset": lambda self: None,
        },
    )
    names: dict[str, dict[str, Any]] = {
        "sglang.srt.utils": helpers,
        "sglang.srt.utils.common": helpers,
        "sglang.srt.utils.rank_consensus_checker": {"rank_consensus": _decorate_nothing},
        "sglang.srt.session.streaming_session": {
            "StreamingSession": streaming,
            "is_virtual_node": lambda node: False,
        },
        "sglang.srt.mem_cache.allocator.page_interleave": {"page_interleave_shard_size": lambda allocator: 1},
    }
    sys.meta_path.insert(0, _Finder(directory, names))


def _find_package() -> Path:
    spec = util.find_spec("sglang")  # finds without importing
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
    return Path(next(iter(spec.submodule_search_locations))).parent


class SGLangTree:
    """`UnifiedRadixCache` with its Rust core (the default of SGLang), or the older `RadixCache` in Python.

    directory   holds the unpacked package `sglang/`; None for an installed one
    argument    "rust" or "radix"
    """

    def __init__(self, block_size: int, num_tokens: int, directory: Path | None, argument: str) -> None:
        import torch

        torch.set_num_threads(1)
        _install(directory or _find_package())
        base = import_module(_MEM_CACHE + "base_prefix_cache")
        tree = import_module(_MEM_CACHE + "radix_cache")
        self._torch = torch
        self._block_size = block_size
        self._freed = _FreedSlots()
        self._key = tree.RadixKey
        self._match_params, self._insert_params, self._evict_params = (
            base.MatchPrefixParams,
            base.InsertParams,
            base.EvictParams,
        )
        params = import_module(_MEM_CACHE + "cache_init_params").CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self._freed, page_size=block_size
        )
        if argument == "rust":
            component = import_module(_MEM_CACHE + "unified_cache.component_type").ComponentType
            params.tree_components = (component.FULL,)
            params.tree_core_backend = "rust"
            self.tree = import_module(_MEM_CACHE + "unified_radix_cache").UnifiedRadixCache(params)
            core = self.tree.tree_core
            if type(core).__name__ != "RustUnifiedTreeCore":
                raise ImportError(f"SGLang fell back to {type(core).__name__}: its Rust core cannot be loaded")
            root = self.tree.root_node_handle()
            self._path = lambda node: core.collect_full_device_indices(node, root)
        else:
            self.tree = tree.RadixCache(params)
            self._path = self.tree.path_device_indices

    def key(self, token_ids: Sequence[int]) -> array[int]:
        """The tokens as 64-bit integers."""
        return array("q", token_ids)

    def cut(self, key: array[int], num_tokens: int) -> array[int]:
        """The first tokens of it."""
        return key[:num_tokens]

    def value(self, block_ids: Sequence[int]) -> Any:
        """The slots of all tokens, int64: (num_tokens,)"""
        blocks = self._torch.tensor(block_ids, dtype=self._torch.int64)
        return (blocks[:, None] * self._block_size + self._torch.arange(self._block_size)).reshape(-1)

    def match(self, key: array[int]) -> tuple[int, Any]:
        """See `Tree`."""
        result = self.tree.match_prefix(self._match_params(key=self._key(key)))
        return result.device_prefix_len, result.last_device_node

    def locations(self, match: Any) -> Any:
        """The slots of the matched tokens, collected along the path."""
        return self._path(match)

    def lock(self, match: Any) -> Any:
        """See `Tree`."""
        return self.tree.lock(match)

    def insert(self, key: array[int], value: Any, num_known: int) -> int:
        """See `Tree`."""
        params = self._insert_params(key=self._key(key), value=value, prev_prefix_len=num_known)
        return int(self.tree.insert(params).prefix_len)

    def unlock(self, lock: Any) -> None:
        """See `Tree`."""
        self.tree.unlock(lock)

    def evict(self, num_tokens: int) -> list[Any]:
        """See `Tree`; whole leaves go."""
        self.tree.evict(self._evict_params(num_tokens=num_tokens))
        return self._freed.take()

    def blocks_of(self, locations: Any) -> list[int]:
        """The blocks of these slots, which must be whole blocks."""
        torch = self._torch
        parts = locations if isinstance(locations, list) else [locations]
        slots = torch.cat([part.to(torch.int64) for part in parts]) if parts else torch.empty(0, dtype=torch.int64)
        blocks = slots[:: self._block_size] // self._block_size
        assert torch.equal(self.value(blocks.tolist()), slots), "slots that are no whole blocks"
        return [int(block) for block in blocks]

    def num_nodes(self, match: Any) -> None:
        """The Rust core's handles do not tell."""
