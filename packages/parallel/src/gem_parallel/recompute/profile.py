"""What a forward pass keeps for its backward pass, region by region. Imports no torch.

A region is a part of a model that may be run again in the backward pass, in place of keeping what
it made. Memory is told by storages: a number for each, so that a tensor which two operators keep,
or which is kept as a view, counts once.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from gem_opkit.cost import Cost


@dataclass(frozen=True, slots=True)
class Call:
    """One operator that ran in a region.

    Attributes:
        name: as torch prints the operator, such as ``aten.mm.default``.
        place: how many of that name came before it in the region.
        cost: FLOPs, and bytes read and written.
        made: storages that are new with it; none for a view.
        can_be_kept: whether its results may be kept in place of being made again: new memory that
            nothing writes into afterwards.
    """

    name: str
    place: int
    cost: Cost
    made: tuple[int, ...] = ()
    can_be_kept: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    """One region of a forward pass.

    Attributes:
        name: of the module.
        calls: in the order in which they ran.
        inputs: storages of the tensors that it was given.
        saved: storages that autograd keeps of it, in the order in which it did.
        needed_calls: calls that have run once the last of these was there; running it again
            ends there.
        saved_by: the storages again, by the operator that they are kept for.
    """

    name: str
    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    saved: tuple[int, ...]
    needed_calls: int
    saved_by: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """A forward pass.

    Attributes:
        regions: in the order in which they ran.
        outside: storages that are kept outside of regions: those before the first region, between
            the first and the second, and so on; one more than there are regions.
        bytes: storage -> its size.
        packed: storage -> its size when it is packed; of those that a packing shortens.
    """

    regions: tuple[Region, ...]
    outside: tuple[tuple[int, ...], ...]
    bytes: Mapping[int, int]
    packed: Mapping[int, int]

    def size(self, storages: Iterable[int]) -> int:
        """Bytes of storages, each counted once.

        Args:
            storages: numbers of them.
        """
        return sum(self.bytes[storage] for storage in set(storages))

    def packed_size(self, storages: Iterable[int]) -> int:
        """Bytes of storages, each counted once, as packed where that shortens it.

        Args:
            storages: numbers of them.
        """
        return sum(self.packed.get(s, self.bytes[s]) for s in set(storages))

    def most_at_once(self, region: Region, packed: Collection[int]) -> int:
        """Bytes of packed storages that the backward pass of a region holds whole at a time.

        Args:
            region: whose operators' backward passes run one by one.
            packed: its storages that are packed.

        Returns:
            those of two operators that follow one another; an operator's inputs are kept just
            before it ran and its results just after.
        """
        parts = [*region.saved_by, ()]
        return max(
            (self.size({*one, *other} & {*packed}) for one, other in pairwise(parts)), default=0
        )

    def unchanged_bytes(self) -> int:
        """What is kept where nothing is run again and nothing packed."""
        kept = {s for region in self.regions for s in region.saved}
        return self.size(kept.union(*self.outside))


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast work is done, to weigh time against memory.

    Attributes:
        flops_per_s: of matrix products and attention.
        bytes_per_s: read plus written.
        call_ms: shortest time of an operator that makes something.
        pack_bytes_per_s: read plus written while packing, and while unpacking. A step of 40 GB that
            is kept in fp8 takes 45 ms longer on an H200 (``results/h200/memory.jsonl``).
    """

    flops_per_s: float = 650e12
    bytes_per_s: float = 3.4e12
    call_ms: float = 0.004
    pack_bytes_per_s: float = 2.6e12

    def ms(self, call: Call) -> float:
        """Time of a call, milliseconds.

        Args:
            call: of an operator; a view takes none.
        """
        if not call.made:
            return 0.0
        return max(self.call_ms, call.cost.roofline_ms(self.flops_per_s, self.bytes_per_s))


# Of an H200: four fifths of what a large product and a large copy reach there.
H200 = Rates()
