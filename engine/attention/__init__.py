"""Attention through block tables: `attend` is what models call, `reference` is what it is tested against."""

from .gather import gather_attention as attend

__all__ = ["attend"]
