"""Checks of integer arguments at the public edge: an error that names the argument, the value and the rule."""

from __future__ import annotations


def integer(value: int, name: str) -> int:
    """The value, if it is an integer (a bool is none); TypeError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    return value


def at_least(least: int, value: int, name: str) -> int:
    """The value, if it is an integer and not below `least`; TypeError or ValueError otherwise."""
    if integer(value, name) < least:
        raise ValueError(f"{name} is {value}; allowed: {least} and more")
    return value
