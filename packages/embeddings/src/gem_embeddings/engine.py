"""What every engine of sharded tables promises, and the door that builds one.

An engine holds the shards of one rank. Its forward pass looks up the rank's own batch in tables
that lie on many ranks; its backward pass moves the rows. Gradients, averages and counts mean the
same in every engine, so that a model and its tests do not know which one they have.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, get_args, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gem_embeddings.contract import LookupSpec, OptimizerSpec, RowDtype, TablePlan, TableSpec
from gem_embeddings.counters import TableCounts
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, UnsupportedError, refusal
from gem_parallel.contract import SPARSE_AXES
from gem_parallel.copy_engine.choose import GatherChoice
from gem_parallel.launch import World

Engine = Literal["torch", "torchrec"]
# When rows move: in every backward pass, or in ``apply``.
Update = Literal["backward", "step"]
# What sharding groups exchange: their rows, now and then, or the gradients of every update.
Exchanged = Literal["weights", "gradients"]


class StartedLookup:
    """A lookup whose ids are on their way to the ranks that hold their rows.

    Made by ``TableEngine.start`` and given to ``forward`` once. Rows are read in ``forward``, not
    before, so rows that move in between are read as they are then; ``TableEngine.read_ahead`` is
    the exception.
    """

    def tensors(self) -> list[Tensor]:
        """Return what the forward pass, the backward pass and the update read on the device.

        Whoever started a call on another stream has to tell the allocator of it.
        """
        return []


class TableEngine(nn.Module, ABC):
    """Tables that are sharded over ranks.

    What the two axes of the ranks mean, with ``table_shard`` ranks in a sharding group and
    ``table_replicate`` such groups:

    - Every rank's loss is the mean over its own batch. The gradient of a table is the mean over
      the ranks of the sharding group: their sum, divided by ``table_shard``. A rank without
      examples adds zeros and still counts.
    - The backward pass moves the rows in place, by the rule of the ``OptimizerSpec``. There are no
      gradients to read and there is no step to call. Rows that were looked up within range move;
      no others do.
    - ``sync`` replaces weights and optimizer rows by their mean over the sharding groups. An
      engine whose plan is fully sharded does it in every backward pass.

    Two settings change that:

    - ``update="step"``: backward passes hold the gradients of rows, and add up. ``apply`` moves
      the rows once, by the sum; ``discard`` drops what is held.
    - ``replicas="gradients"``: the gradient is the mean over all ranks, of all sharding groups.
      Every group moves its rows by it, so groups stay equal bit for bit, ``sync`` has nothing to
      do, and any plan learns what one process would from the batches of all ranks.

    Forward and backward are collective: every rank has to run them equally often and in the same
    order, a rank whose data has ended with empty batches.

    Rows are no parameters: optimizers do not see them, ``to`` does not move them, and
    ``state_dict`` does not hold them. ``gem_embeddings.checkpoint`` saves and loads them.

    Attributes:
        world: the ranks.
        plan: where the tables lie.
        specs: the tables, in the order given.
        optimizer: how rows learn; its ``lr`` is the initial one.
        update: when rows move.
        replicas_exchange: what sharding groups exchange.
        step: times that rows have moved: backward passes, or calls of ``apply``. Set when a
            checkpoint is loaded.
    """

    world: World
    plan: TablePlan
    specs: tuple[TableSpec, ...]
    optimizer: OptimizerSpec
    update: Update
    replicas_exchange: Exchanged
    step: int

    @abstractmethod
    def forward(
        self,
        ids: Mapping[str, Jagged] | StartedLookup,
        weights: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Look up every feature of this rank's own batch; as ``EmbeddingTables.forward``.

        Args:
            ids: feature -> ids, or what ``start`` returned.
            weights: feature -> weight of each id; already given where ``ids`` were started.

        Returns:
            feature -> x_BE, or for pooling ``none`` x_IE; fp32.

        Raises:
            DataError: bad ids on any rank of the sharding group; every rank of it raises.
        """

    @abstractmethod
    def start(
        self, ids: Mapping[str, Jagged], weights: Mapping[str, Tensor] | None = None
    ) -> StartedLookup:
        """Check ids and send them to the ranks that hold their rows, without reading a row.

        Args:
            ids: feature -> ids.
            weights: feature -> weight of each id.

        Returns:
            what ``forward`` takes in place of the ids.

        Raises:
            DataError: bad ids on any rank of the sharding group; every rank of it raises.
        """

    def round_vectors(self) -> bool:
        """Give vectors in bf16 where autocast would round them to it; so do gradients come back.

        For a model that reads each vector once, and by products under autocast alone: these would
        round it to the same bits, in a pass of their own.

        Returns:
            whether this engine does it; False leaves vectors in fp32.
        """
        return False

    @property
    def reads_ahead(self) -> bool:
        """Whether there are ``start_ahead`` and ``read_ahead``, since nothing has to travel."""
        return False

    @property
    def starts_ahead(self) -> bool:
        """Whether there is ``start_ahead``: what the host has to know comes to it meanwhile."""
        return False

    def start_ahead(self, ids: Mapping[str, Jagged]) -> StartedLookup:
        """Start a call of a step that is yet to come; it is counted when it is looked up.

        Args:
            ids: as for ``start``.

        Returns:
            what ``read_ahead`` and ``forward`` take.

        Raises:
            UnsupportedError: not where ``starts_ahead`` is true.
        """
        raise self._not_ahead("start_ahead", "starts_ahead")

    def read_ahead(self, started: StartedLookup) -> None:
        """Read the rows of a started call before ``forward`` does, on the current stream.

        They have to be what ``forward`` would find: call it once rows have moved.

        Args:
            started: from ``start_ahead``.

        Raises:
            UnsupportedError: not where ``reads_ahead`` is true.
        """
        raise self._not_ahead("read_ahead", "reads_ahead")

    @property
    def fetches_ahead(self) -> bool:
        """Whether there are ``start_ahead`` and ``fetch_ahead``, of vectors that travel."""
        return False

    def fetch_ahead(self, started: StartedLookup) -> None:
        """Fetch the vectors of a started call before ``forward`` does, on the current stream.

        Collective over the sharding group. They have to be what ``forward`` would find: call it
        once rows have moved.

        Args:
            started: from ``start_ahead``.

        Raises:
            UnsupportedError: not where ``fetches_ahead`` is true.
        """
        raise self._not_ahead("fetch_ahead", "fetches_ahead")

    def _not_ahead(self, call: str, where: str) -> UnsupportedError:
        return UnsupportedError(
            refusal(
                "tables",
                call,
                must=f"be called where {where} is true",
                got=f"{type(self).__name__} on {self.world.size} ranks",
                fix="look rows up in the forward pass",
            )
        )

    @overload
    def apply(self) -> None: ...

    @overload
    def apply(self, fn: Callable[[nn.Module], None]) -> Self: ...

    def apply(self, fn: Callable[[nn.Module], None] | None = None) -> Self | None:
        """Move rows by the sum of the gradients that backward passes hold, and hold none.

        Collective over all ranks. A rank whose batches named no row takes part with none.

        Args:
            fn: called with this module instead, as by ``apply`` of any other; rows are not its.

        Raises:
            ConfigError: rows move in the backward pass, or no backward pass has run since the last
                ``apply`` or ``discard``; the same on every rank.
        """
        if fn is not None:
            return super().apply(fn)
        self.apply_held()
        return None

    @abstractmethod
    def apply_held(self) -> None:
        """Move rows by what is held: what ``apply`` does."""

    @abstractmethod
    def discard(self) -> None:
        """Drop the gradients that backward passes hold; rows and ``step`` stay as they are.

        Not collective, but all ranks have to do it, or none.

        Raises:
            ConfigError: rows move in the backward pass.
        """

    @abstractmethod
    def held_finite(self) -> Tensor:
        """Tell whether the gradients held on this rank, and their squares, are finite.

        Those of the rows that this rank holds, from all ranks of its sharding group: two ranks may
        get different answers. Where groups exchange gradients, a gradient whose sum could overflow
        in ``wire_dtype`` is not finite either. Waits for no device.

        Returns:
            a bool scalar on the device of the tables; True where nothing is held.

        Raises:
            ConfigError: rows move in the backward pass.
        """

    @abstractmethod
    def sync(self) -> None:
        """Replace weights and optimizer rows by their mean over the sharding groups.

        Collective over all ranks. Nothing happens with one group, where the plan is fully sharded,
        which keeps the mean at all times, or where groups exchange gradients and so are equal.
        """

    @property
    @abstractmethod
    def lr(self) -> float:
        """Learning rate of the next backward pass, or of the next ``apply``."""

    @abstractmethod
    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next backward pass, or of the next ``apply``.

        Args:
            lr: at least 0.

        Raises:
            ConfigError: negative or not finite.
        """

    @abstractmethod
    def counters(self) -> dict[str, TableCounts]:
        """Return what this rank asked each table for in training, since counting began."""

    @abstractmethod
    def table_state(self) -> dict[str, Tensor]:
        """Return what this rank holds, for a checkpoint.

        Returns:
            ``tables.<name>.weight`` and ``tables.<name>.<optimizer row>`` -> DTensor of the whole
            table, or a plain tensor on one rank. They share memory with the tables: copying into
            them changes the tables. Gradients that are held are no part of it.
        """

    @abstractmethod
    def load_table_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state; shapes and layout as those of ``table_state``.

        Gradients that are held are dropped, unless the state is refused.

        Args:
            state: the same keys. Tensors of ``table_state`` itself, which were overwritten in
                place, are accepted.

        Raises:
            ConfigError: other keys, or another layout.
        """

    @abstractmethod
    def full_weight(self, name: str) -> Tensor:
        """Gather one table on every rank of its sharding group, for tests and small exports.

        Args:
            name: of the table.

        Returns:
            (R, E) in the dtype of its rows; a copy.

        Raises:
            ConfigError: no such table.
        """

    @property
    @abstractmethod
    def feature_names(self) -> tuple[str, ...]:
        """Every feature that ``forward`` needs, table by table."""


def build_tables(  # noqa: PLR0913 - the last five are settings of their own
    specs: Sequence[TableSpec],
    lookups: Sequence[LookupSpec],
    plan: TablePlan,
    optimizer: OptimizerSpec,
    world: World,
    *,
    engine: Engine = "torch",
    device: torch.device | str | None = None,
    wire_dtype: RowDtype = "fp32",
    seed: int = 0,
    mesh: DeviceMesh | None = None,
    update: Update = "backward",
    replicas: Exchanged = "weights",
    single_pass: bool = False,
    gathers: GatherChoice | None = None,
) -> TableEngine:
    """Build the engine that holds this rank's part of the tables. Every rank has to call it.

    Args:
        specs: the tables; names differ.
        lookups: features whose pooling differs from their table's, or that no table names.
        plan: where every table lies; its ranks are those of the world.
        optimizer: how rows learn.
        world: the ranks; a process group must exist when there are several.
        engine: ``torch`` runs on any device and takes every plan; ``torchrec`` needs the extra of
            that name.
        device: of the tables; None for the world's.
        wire_dtype: format in which vectors and their gradients travel between ranks. Ids travel as
            int64 and sums are formed in fp32 whatever it is.
        seed: of the initial weights and of stochastic rounding. Initial weights depend on it, on
            the table's name, row and column alone, so every plan starts with the same bits.
        mesh: axes (table_shard, table_replicate) over all ranks; None makes one. Engines of one
            job may share it.
        update: ``backward`` moves rows in every backward pass. ``step`` holds their gradients over
            several, until ``apply`` moves the rows or ``discard`` drops them.
        replicas: ``weights`` lets each sharding group learn from its own ranks, and averages rows
            in ``sync``: one exchange of all rows, as rarely as wanted. ``gradients`` merges the row
            gradients of all groups before rows move: exact, for an exchange in every step.
        single_pass: with ``step``, that a step has one backward pass alone. On one rank ``torch``
            then need not pick out different rows, and waits for the device in no step.
        gathers: how the slices of fully sharded rows are gathered: by NCCL (None), or by the copy
            engines of one host's GPUs from some size on. The rows have the same bits either way.

    Returns:
        the engine.

    Raises:
        ConfigError: a plan for other ranks or tables, a mesh of other axes, or specs that
            contradict each other.
        UnsupportedError: what the engine cannot do; the message names table, sharding, engine, and
            the engine that can.
    """
    for name, value, kind in (
        ("engine", engine, Engine),
        ("wire_dtype", wire_dtype, RowDtype),
        ("update", update, Update),
        ("replicas", replicas, Exchanged),
    ):
        known = get_args(kind)
        if value not in known:
            raise ConfigError(
                refusal(
                    "build_tables",
                    name,
                    must="be " + " or ".join(f'"{one}"' for one in known),
                    got=repr(value),
                    fix="choose one of them",
                )
            )
    if mesh is not None:
        _check_mesh(mesh, plan)
    given: dict[str, Any] = {
        "device": world.device if device is None else torch.device(device),
        "wire_dtype": wire_dtype,
        "seed": seed,
        "mesh": mesh,
        "update": update,
        "replicas": replicas,
    }
    # Imported here: each engine brings what the other does not need, torchrec a compiled library.
    # Any: a type checker that also finds this package installed sees two classes TableEngine.
    made: Any
    if engine == "torch":
        from gem_embeddings.sharded.engine import TorchTables

        given |= {"single_pass": single_pass, "gathers": gathers}
        made = TorchTables(specs, lookups, plan, optimizer, world, **given)
    else:
        from gem_embeddings.torchrec_tables import TorchrecTables

        made = TorchrecTables(specs, lookups, plan, optimizer, world, **given)
    return made


def _check_mesh(mesh: DeviceMesh, plan: TablePlan) -> None:
    """Refuse a mesh whose groups are not those of the plan: its ranks would average wrongly."""
    wanted = dict(zip(SPARSE_AXES, (plan.table_shard, plan.table_replicate), strict=True))
    found = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False))
    ranks = mesh.mesh.flatten().tolist()
    groups = range(plan.table_replicate)
    order = [plan.world_rank(rank, m) for rank in range(plan.table_shard) for m in groups]
    if found != wanted or list(found) != list(wanted) or ranks != order:
        raise ConfigError(
            refusal(
                "build_tables",
                "mesh",
                must=f"have the axes {wanted} over ranks "
                + (f"0 to {plan.ranks - 1} in order" if order == sorted(order) else f"{order}"),
                got=f"{found or tuple(mesh.mesh.shape)} over {ranks}",
                fix="leave it out, or make it with gem_parallel.mesh.table_mesh for this plan",
            )
        )
