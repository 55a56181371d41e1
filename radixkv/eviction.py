"""Policies that rank unlocked leaves: the lowest rank is evicted first.

A policy sees nodes, never blocks or requests. Among equal ranks the tree takes the deepest block first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from .node import RadixNode

Rank: TypeAlias = Callable[[RadixNode], Any]


def lru(node: RadixNode) -> int:
    """Least recently used first: by the tick of the last use of a path through the node."""
    return node.tick


POLICIES: dict[str, Rank] = {"lru": lru}


def rank_of(policy: str | Rank) -> Rank:
    """The ranking function of a policy given by name, or the function itself. Raises ValueError for an unknown name."""
    if callable(policy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"unknown eviction policy {policy!r}; known: {', '.join(sorted(POLICIES))}, or a function")
    return POLICIES[policy]
