"""Shapes on which ``table_update`` is tested and timed: those of the lookup."""

from gem_embeddings.kernels.table_lookup.cases import CASES, TableCase

__all__ = ["CASES", "TableCase"]
