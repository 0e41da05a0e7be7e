"""Process groups of thousands of ranks that exist in name only.

Every other rank is taken to send what this one sends and, where vectors are exchanged, to answer
with zeros. So sizes are those of a real step, and values mean nothing. What this rank gives is
booked in a ledger under the axis of the mesh that a group belongs to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gem_opkit.errors import ConfigError, refusal
from gem_parallel.dry_run.ledger import Ledger
from gem_parallel.launch import World

# Untyped: torch calls these methods by position, under names of its own.
_ProcessGroup: Any = dist.ProcessGroup
# By name: the stubs of torch leave out what its own process groups in Python end their work with.
_c10d: Any = import_module("torch._C._distributed_c10d")
_meshes: Any = import_module("torch.distributed.device_mesh")
_BACKEND = "gem_dry_run"
# Torch describes the group of a mesh's axis so.
_MESH = "mesh_"
_ledgers: list[Ledger] = []


@dataclass(frozen=True, slots=True)
class NamedRanks:
    """A job of which one rank runs.

    Attributes:
        world: the ranks, as that one sees them.
        ledger: what it gives to collectives.
    """

    world: World
    ledger: Ledger


class NamedGroup(_ProcessGroup):
    """A process group without other processes: each of its ranks sends what this one sends.

    Args:
        rank: of this process in the group.
        size: ranks of the group.
        ledger: where calls are booked; those of a group of one rank are not.
    """

    def __init__(self, rank: int, size: int, ledger: Ledger) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, ""
        self._ledger, self.axis = ledger, "world"

    # Torch names a group through its backend, of which this one has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        if desc.startswith(_MESH):
            self.axis = desc.removeprefix(_MESH)

    @property
    def group_name(self) -> str:
        """Name by which torch finds the group."""
        return self._name

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return _BACKEND

    def book(self, collective: str, *given: Tensor) -> None:
        """Note what this rank gives to a call.

        Args:
            collective: its name.
            given: the tensors.
        """
        if self._size > 1:
            self._ledger.add(
                self.axis, collective, sum(t.numel() * t.element_size() for t in given)
            )

    def _done(self, collective: str, *given: Tensor) -> Any:
        self.book(collective, *given)
        ended: Future[None] = Future()
        ended.set_result(None)
        return _c10d._create_work_from_future(ended)

    def alltoall_base(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: list[int],
        splits: list[int],
        opts: Any,
    ) -> Any:
        """From every rank comes what this one sends to itself; vectors are zeros."""
        if given.dtype == torch.int64:
            sizes = splits or [given.shape[0] // self._size] * self._size
            begin = sum(sizes[: self._rank])
            own = given[begin : begin + sizes[self._rank]]
            output.copy_(own.repeat(self._size))
        else:
            output.zero_()
        return self._done("all_to_all", given)

    def allgather(self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any) -> Any:
        """Every rank gives what this one gives."""
        for parts, own in zip(outputs, given, strict=True):
            for part in parts:
                part.copy_(own)
        return self._done("all_gather", *given)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any) -> Any:
        output.view(self._size, -1).copy_(given.view(1, -1))
        return self._done("all_gather", given)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any) -> Any:
        output.copy_(given.view(self._size, -1)[self._rank].view(output.shape))
        return self._done("reduce_scatter", given)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: Any
    ) -> Any:
        """As many gathers in one call."""
        for output, own in zip(outputs, given, strict=True):
            output.view(self._size, -1).copy_(own.view(1, -1))
        return self._done("all_gather", *given)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: Any
    ) -> Any:
        """As many reductions in one call."""
        for output, own in zip(outputs, given, strict=True):
            output.copy_(own.view(self._size, -1)[self._rank].view(output.shape))
        return self._done("reduce_scatter", *given)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Leave the values: the mean of equal ones."""
        return self._done("all_reduce", *tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        """As many reductions in one call."""
        return self._done("all_reduce", *tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Leave the values: those of equal ranks."""
        return self._done("broadcast", *tensors)

    def barrier(self, opts: Any) -> Any:
        """Wait for nobody."""
        return self._done("barrier")

    # The names of torch 2.13 for the two above.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base


def _group_of(store: Any, rank: int, size: int, timeout: Any) -> NamedGroup:
    return NamedGroup(rank, size, _ledgers[-1])


@contextmanager
def _axes_apart() -> Iterator[None]:
    """Give each axis of a mesh a group of its own; torch takes that of all ranks where it can."""
    mesh: Any = _meshes.DeviceMesh
    before = mesh._init_one_process_group

    def apart(layout: Any, ranks: Any, name: str, override: tuple[Any, Any]) -> Any:
        return before(layout, ranks, name, (override[0] or _BACKEND, override[1]))

    mesh._init_one_process_group = staticmethod(apart)
    try:
        yield
    finally:
        mesh._init_one_process_group = staticmethod(before)


@contextmanager
def named_ranks(rank: int, size: int, *, op: str = "named_ranks") -> Iterator[NamedRanks]:
    """Be one rank of a job whose other ranks exist in name only, for the length of a block.

    Args:
        rank: 0 <= rank < size.
        size: ranks of the job, 2 or more.
        op: who asks, for the message.

    Yields:
        The ranks.

    Raises:
        ConfigError: a process group exists already.
    """
    if dist.is_initialized():
        raise ConfigError(
            refusal(
                op,
                "process group",
                must="not exist, because ranks are only named here",
                got="one",
                fix="call it in a process of its own",
            )
        )
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, _group_of, devices=["cpu"])
    ledger = Ledger()
    _ledgers.append(ledger)
    try:
        dist.init_process_group(_BACKEND, rank=rank, world_size=size, store=dist.HashStore())
        try:
            with _axes_apart():
                yield NamedRanks(World(rank=rank, size=size), ledger)
        finally:
            dist.destroy_process_group()
    finally:
        _ledgers.pop()
