"""Number the ids of all features through all tables, in launches that do not grow with features.

Features whose tables treat ids alike are joined. What differs from one to the next, such as the
rows of its table, reaches its part through operators on lists, which are one launch on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gem_embeddings.contract import OutOfRange, TableSpec
from gem_embeddings.hashing import hash_parts_to_rows


@dataclass(frozen=True, slots=True)
class Numbered:
    """Rows of ids.

    Attributes:
        keys_I: rows numbered through all tables, feature after feature; the number of all rows for
            an id that is not looked up.
        refuses: above 0 where an id lies outside a table that refuses it; on the device.
        outside_T: ids outside each table that reads them otherwise, on the device; None where
            nobody counts.
    """

    keys_I: Tensor
    refuses: Tensor | int
    outside_T: Tensor | None


class RowNumbers:
    """How ids of each feature become rows.

    Args:
        specs: the tables.
        tables: index of the table of each feature.
        first_key: number of the first row of each table, and of all rows.
        device: of the ids.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        tables: Sequence[int],
        first_key: Sequence[int],
        device: torch.device,
    ) -> None:
        self._beyond, self._tables = first_key[-1], len(specs)
        self._first = [first_key[table] for table in tables]
        self._rows = [specs[table].num_embeddings for table in tables]
        self._seeds = [specs[table].hash_seed for table in tables]
        # Features by what becomes of an id outside; None where all ids are hashed.
        self._alike: dict[OutOfRange | None, list[int]] = {}
        for feature, table in enumerate(tables):
            spec = specs[table]
            policy = None if spec.id_space == "hash" else spec.out_of_range
            self._alike.setdefault(policy, []).append(feature)
        self._tables_of = {
            policy: torch.tensor([tables[i] for i in members], dtype=torch.int64).to(device)
            for policy, members in self._alike.items()
        }

    def number(self, ids: Sequence[Tensor], *, count: bool) -> Numbered:
        """Number ids. Nothing waits for a GPU.

        Args:
            ids: int64 ids of each feature.
            count: whether ids outside are counted.

        Returns:
            the rows.
        """
        found: dict[int, Tensor] = {}
        refuses: Tensor | int = 0
        outside_T: Tensor | None = None
        for policy, members in self._alike.items():
            joined_I = torch.cat([ids[i] for i in members])
            sizes = [ids[i].shape[0] for i in members]
            first = [self._first[i] for i in members]
            rows = [self._rows[i] for i in members]
            if policy is None:
                keys_I = hash_parts_to_rows(
                    joined_I, sizes, rows, [self._seeds[i] for i in members]
                )
                torch._foreach_add_(keys_I.split(sizes), first)
            else:
                keys_I = joined_I.clamp(min=0)
                parts = keys_I.split(sizes)
                torch._foreach_clamp_max_(parts, [n - 1 for n in rows])
                outside_I = keys_I != joined_I
                torch._foreach_add_(parts, first)
                if policy != "clamp":
                    keys_I.masked_fill_(outside_I, self._beyond)
                if policy == "error":
                    refuses = outside_I.sum()
                elif count:
                    if outside_T is None:
                        outside_T = keys_I.new_zeros(self._tables)
                    outside_T.index_add_(0, self._tables_of[policy], sums_of(outside_I, sizes))
            found.update(zip(members, keys_I.split(sizes), strict=True))
        return Numbered(torch.cat([found[i] for i in range(len(ids))]), refuses, outside_T)


def sums_of(values_I: Tensor, sizes: Sequence[int]) -> Tensor:
    """Add up the parts of a tensor.

    Args:
        values_I: whole numbers or flags, part after part.
        sizes: of the parts, on the host.

    Returns:
        int64, one sum for each part, on the device of the values.
    """
    seen_I = torch.zeros(values_I.shape[0] + 1, dtype=torch.int64, device=values_I.device)
    torch.cumsum(values_I, 0, out=seen_I[1:])
    return torch.cat([seen_I[end : end + 1] for end in accumulate(sizes, initial=0)]).diff()
