"""Pictures of a cache, a node, a block table, a pool and a replay: SVG as text, from the standard library alone.

    draw_cache    the tree as an icicle and the pool as a strip           `overview`, `icicle`, `strip`
    draw_node     the way to a node and what hangs below it
    draw_pool     the pool of a manager without a tree
    draw_table    a request's block table                                 `table`
    draw_turns    hit rate and time to the first token by turn            `turns`

In a notebook the objects draw themselves (`_repr_mimebundle_`); these functions are for pages, films and arguments.
The objects are known by protocols (`subjects`), so that they can import this and not the reverse.
"""

from .overview import draw_cache, draw_node, draw_pool
from .svg import mime_bundle, safe
from .table import draw_block_table, draw_table
from .turns import draw_turns

__all__ = [
    "draw_block_table",
    "draw_cache",
    "draw_node",
    "draw_pool",
    "draw_table",
    "draw_turns",
    "mime_bundle",
    "safe",
]
