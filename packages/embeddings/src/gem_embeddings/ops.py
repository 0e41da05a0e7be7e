"""The public operators on tables that lie in one flat buffer, imported by name.

They are what a sharded engine is built of: ``table_lookup`` reads rows, ``table_update`` moves
them, and neither makes a tensor of a table's size.
"""

from gem_embeddings.kernels.table_lookup.op import id_weight_gradient, table_lookup
from gem_embeddings.kernels.table_update.op import table_update
from gem_embeddings.table_layout import FeatureSlot, TableLayout, TableSlot

__all__ = [
    "FeatureSlot",
    "TableLayout",
    "TableSlot",
    "id_weight_gradient",
    "table_lookup",
    "table_update",
]
