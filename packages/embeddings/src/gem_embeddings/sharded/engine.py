"""The ``torch`` engine: sharded tables on torch.distributed alone, for every plan and any device.

A call runs in two halves. ``start`` numbers, sorts and sends the ids; ``forward`` reads the rows at
their owners, sends vectors back and pools them. The backward pass sends the gradients of the
different rows to the owners, which merge and move them. Fully sharded, the rows are gathered over
the sharding groups before they are read or moved, and their mean is scattered back afterwards.

Left out: rows that do not fit in device memory.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gem_embeddings.contract import LookupSpec, OptimizerSpec, RowDtype, TablePlan, TableSpec
from gem_embeddings.counters import TableCounts
from gem_embeddings.engine import StartedLookup, TableEngine
from gem_embeddings.sharded.calls import Exchange, Pool, Started, check_started
from gem_embeddings.sharded.collectives import Collectives
from gem_embeddings.sharded.direct import Direct, Part
from gem_embeddings.sharded.exchange import Arrived, IdExchange
from gem_embeddings.sharded.places import OP, TORCH_DTYPE, Shard, StoreKey, places_of
from gem_embeddings.sharded.replicas import Gathered, Replicas
from gem_embeddings.sharded.requests import Features
from gem_embeddings.sharded.state import load_pieces, state_of
from gem_embeddings.sharded.storage import RowStore
from gem_embeddings.sharded.traffic import Traffic, Update
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, DataError, refusal
from gem_parallel.contract import SPARSE_AXES
from gem_parallel.launch import World


class TorchTables(TableEngine):
    """Sharded tables on torch.distributed; see ``TableEngine`` for what forward and backward mean.

    Args:
        specs: the tables; names differ.
        lookups: features whose pooling differs from their table's, or that no table names.
        plan: where every table lies.
        optimizer: how rows learn.
        world: the ranks.
        device: of the tables.
        wire_dtype: format of vectors and gradients between ranks; not used by a single rank.
        seed: of initial weights and stochastic rounding.
        mesh: axes (table_shard, table_replicate) over all ranks; None makes one.

    Attributes:
        group: collectives over the sharding group, with counts of calls and bytes.
        replicas: collectives over the ranks that hold the same rows.

    Raises:
        ConfigError: a plan for other ranks or tables, or specs that contradict each other.
        UnsupportedError: row-wise AdaGrad over columns whose rows are cut differently.

    Numerics: gradients of a row are added in the order of the ranks. On a CPU a call is
        deterministic. The accumulator of row-wise AdaGrad is that of the whole row also where
        columns are cut.
    Cost: a call sends each different id once to each rank that holds a piece of its row, 8 bytes,
        and its vector back once; the backward pass sends its gradient once. The host waits for the
        device once a call, to learn the sizes of these messages.
    """

    def __init__(  # noqa: PLR0913 - those of build_tables
        self,
        specs: Sequence[TableSpec],
        lookups: Sequence[LookupSpec],
        plan: TablePlan,
        optimizer: OptimizerSpec,
        world: World,
        *,
        device: torch.device,
        wire_dtype: RowDtype = "fp32",
        seed: int = 0,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        _check_ranks(plan, world)
        self.world, self.plan, self.optimizer = world, plan, optimizer
        self.specs = tuple(specs)
        self.step = 0
        self._lr = optimizer.lr
        self._device = device
        self._places = places_of(specs, plan, optimizer)
        self._features = Features(specs, lookups, self._places.first_key, device)
        if mesh is None and world.size > 1:
            shape = (plan.table_shard, plan.table_replicate)
            mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=SPARSE_AXES)
        self.mesh = mesh
        self._rank, replica = divmod(world.rank, plan.table_replicate)
        self.group = _axis(mesh, "table_shard", plan.table_shard)
        self.replicas = _axis(mesh, "table_replicate", plan.table_replicate)
        held = Replicas(
            self.replicas,
            replica,
            plan.table_replicate,
            plan.fully_sharded and plan.table_replicate > 1,
        )

        def stores_of(shards: Sequence[Shard], keys: Iterable[StoreKey]) -> dict[Any, RowStore]:
            return {
                key: RowStore(
                    key,
                    [shard for shard in shards if self._places.store_of(shard) == key],
                    self.specs,
                    optimizer,
                    held,
                    device=device,
                    seed=seed,
                )
                for key in keys
            }

        self._stores = stores_of(self._places.by_rank[self._rank], self._places.stores)
        # Apart from the shards, so that all ranks of a group hold equal buffers of copies and
        # their means are formed in the same order.
        copies = [
            Shard(table, self._rank, 0, spec.num_embeddings, 0, spec.embedding_dim)
            for table, spec in enumerate(specs)
            if table in self._places.replicated
        ]
        self._copies = stores_of(copies, sorted({self._places.store_of(s) for s in copies}))
        self._ids = IdExchange(self._places, self._rank, self.group, device)
        self._traffic = Traffic(
            self._places,
            self._rank,
            self._ids,
            self.group,
            self._stores,
            self._copies,
            optimizer,
            wire=TORCH_DTYPE[wire_dtype],
            seed=seed,
            device=device,
        )
        # A group of one rank has nobody to send to.
        self._direct = (
            Direct(self._places, self._all_stores(), self._features, optimizer, seed=seed)
            if plan.table_shard == 1
            else None
        )
        # What makes autograd call the backward pass; no parameter, since no optimizer may see it.
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Every feature that ``forward`` needs, table by table."""
        return tuple(feature.name for feature in self._features.features)

    @property
    def lr(self) -> float:
        """Learning rate of the next backward pass."""
        return self._lr

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next backward pass; at least 0 and finite."""
        if not 0 <= lr < math.inf:
            raise ConfigError(
                refusal(OP, "lr", must="be at least 0 and finite", got=lr, fix="pass another one")
            )
        self._lr = lr

    def start(
        self, ids: Mapping[str, Jagged], weights: Mapping[str, Tensor] | None = None
    ) -> StartedLookup:
        """Check ids and send them to the ranks that hold their rows; see ``TableEngine``."""
        return self._start(ids, {} if weights is None else weights)

    def forward(
        self, ids: Mapping[str, Jagged] | StartedLookup, weights: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Look up every feature of this rank's own batch; see ``TableEngine``."""
        # Left out of compiled graphs, which cannot hold sizes that a collective tells.
        look_up: Any = self._look_up
        return look_up(ids, weights)

    @torch.compiler.disable
    def _look_up(
        self, ids: Mapping[str, Jagged] | StartedLookup, weights: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        if isinstance(ids, StartedLookup):
            check_started(ids, weights)
            started = ids
        else:
            started = self._start(ids, {} if weights is None else weights)
        if not isinstance(started, Started) or started.owner is not self:
            raise ConfigError(
                refusal(
                    OP,
                    "ids",
                    must="have been started by this engine",
                    got=f"a {type(started).__name__} of another engine",
                    fix="call its start",
                )
            )
        started.looked_up = True
        if started.parts is not None:
            return self._pool(started, started.parts)
        arrived = started.arrived
        if arrived.work is not None:
            arrived.work.wait()
            arrived.work = None
        # Typed by hand: torch gives the apply of a Function no type.
        exchange: Any = Exchange.apply
        vectors = (
            exchange(self._anchor, self, started)
            if torch.is_grad_enabled()
            else self.fetch(arrived)
        )
        return self._features.outputs(
            started.request, vectors, self._local_places(started), arrived.asked
        )

    def _start(self, ids: Mapping[str, Jagged], weights: Mapping[str, Tensor]) -> Started:
        mark = self._features.counts.mark()
        fault: Exception | None = None
        try:
            request = self._features.request(ids, weights, count=self.training)
        except Exception as error:  # noqa: BLE001 - raised below, whatever it is
            # The others are told before it is raised: they wait for this rank.
            fault, request = error, self._features.nothing()
        # None where ids have to travel, or have to be picked out all the same.
        parts = self._direct.parts(request) if self._direct is not None and fault is None else None
        arrived = self._ids.send(request.keys_I, request.refuses, send_rows=parts is None)
        if not arrived.refused:
            if self.training:
                for spec, rows in zip(self.specs, arrived.asked, strict=True):
                    self._features.counts.add(spec.name, unique=rows)
            return Started(self, request, arrived, parts)
        self._features.counts.return_to(mark)
        if fault is not None:
            raise fault
        if arrived.outside:
            raise self._features.refusal(request)
        others = ", ".join(
            str(self.world.rank % self.plan.table_replicate + rank * self.plan.table_replicate)
            for rank in arrived.refused
        )
        raise DataError(
            refusal(
                OP,
                "ids",
                must="be good on every rank of the sharding group",
                got=f"a refusal by rank {others}",
                fix="read that rank's error",
            )
        )

    def _local_places(self, started: Started) -> Tensor:
        """For each id its place among the rows of its table, or -1."""
        arrived = started.arrived
        first = [arrived.first[feature.table] for feature in self._features.features]
        return self._features.counted_from(started.request, arrived.places_I, first)

    def _pool(self, started: Started, parts: list[Part]) -> dict[str, Tensor]:
        direct = cast("Direct", self._direct)
        weights = direct.weights(started.request, parts)
        # Typed by hand: torch gives the apply of a Function no type.
        pool: Any = Pool.apply
        flats = (
            pool(self._anchor, self, started, *weights)
            if torch.is_grad_enabled()
            else self.pool(parts, weights)
        )
        return direct.outputs(started.request, parts, flats)

    def pool(self, parts: Sequence[Part], weights: Sequence[Tensor | None]) -> list[Tensor]:
        """Pool rows of this rank alone. Collective over the replicas.

        Args:
            parts: of the call.
            weights: of the ids of each part.

        Returns:
            the flat output of each part.
        """
        with self._whole(states=False) as whole:
            whole.wait()
            return cast("Direct", self._direct).look_up(parts, weights)

    @torch.no_grad()
    def learn_directly(
        self,
        parts: Sequence[Part],
        weights: Sequence[Tensor | None],
        grads: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Move rows of this rank alone. Collective over the replicas.

        Args:
            parts: of the call.
            weights: of the ids of each part.
            grads: gradients of what ``pool`` returned.

        Returns:
            the gradient of each part's weights, where they need one.
        """
        self.step += 1
        with self._whole(states=True) as whole:
            whole.wait()
            found = cast("Direct", self._direct).learn(
                parts, weights, [g.contiguous() for g in grads], lr=self._lr, step=self.step
            )
            if self.plan.fully_sharded:
                self._average()
        return found

    def fetch(self, arrived: Arrived) -> Tensor:
        """Fetch the vectors of the rows that a call asks for. Collective.

        Args:
            arrived: the ids of the call.

        Returns:
            flat fp32 vectors, table after table.
        """
        with self._whole(states=False) as whole:
            whole.wait()
            return self._traffic.fetch(arrived)

    @torch.no_grad()
    def learn(self, arrived: Arrived, grad: Tensor) -> None:
        """Move the rows that a call asked for. Collective.

        Args:
            arrived: the ids of the call.
            grad: gradient of its vectors.
        """
        self.step += 1
        with self._whole(states=True) as whole:
            # Gathered while the gradients travel.
            update = Update(self._lr, self.step, whole.wait)
            self._traffic.learn(arrived, grad.contiguous(), update)
            if self.plan.fully_sharded:
                self._average()

    def _average(self) -> None:
        for store in self._all_stores():
            store.average(self.step)

    def _all_stores(self) -> list[RowStore]:
        return [*self._stores.values(), *self._copies.values()]

    def _whole(self, *, states: bool) -> Gathered:
        return Gathered(
            buffer
            for store in self._all_stores()
            for buffer in (store.buffers() if states else [store.weights])
        )

    @torch.no_grad()
    def sync(self) -> None:
        """Replace weights and optimizer rows by their mean over the groups; see ``TableEngine``."""
        if not self.plan.fully_sharded:
            self._average()

    def gather_ahead(self, *, backward: bool) -> None:
        """Begin to gather fully sharded rows for the next pass. Collective over the replicas.

        By itself a pass gathers when it needs the rows, and waits. Called earlier, where memory for
        the whole is free, this runs beside the dense part: before the dense optimizer's step for
        the next forward pass, and in the dense backward pass, once most activations are gone, for
        that of the tables. Nothing happens where rows are there, or are not cut. Between two GPUs
        of a host it did not pay: the gathers slowed the dense part down by more than they hid.

        Args:
            backward: whether optimizer rows are needed too.
        """
        for buffer in self._whole(states=backward).buffers:
            buffer.gather()

    def counters(self) -> dict[str, TableCounts]:
        """Return what this rank asked each table for in training. Waits for a GPU."""
        return self._features.counts.read()

    def table_state(self) -> dict[str, Tensor]:
        """Return what this rank holds; see ``TableEngine``. With replicas call ``sync`` before."""
        return state_of(self.specs, self._all_stores(), self.optimizer, self.mesh)

    def load_table_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state; see ``TableEngine``."""
        load_pieces(self.table_state(), state)

    @torch.no_grad()
    def full_weight(self, name: str) -> Tensor:
        """Gather one table on every rank of its sharding group. Collective over all ranks."""
        names = [spec.name for spec in self.specs]
        if name not in names:
            raise ConfigError(
                refusal(OP, "name", must=f"be one of {', '.join(names)}", got=name, fix="pick one")
            )
        table = names.index(name)
        spec = self.specs[table]
        with self._whole(states=False) as rows:
            rows.wait()
            whole = torch.zeros(
                (spec.num_embeddings, spec.embedding_dim),
                dtype=TORCH_DTYPE[spec.row_dtype],
                device=self._device,
            )
            for store in self._all_stores():
                for index, shard in enumerate(store.shards):
                    if shard.table == table:
                        columns = slice(shard.column_start, shard.column_end)
                        part = store.shard_weight(index)
                        whole[shard.row_start : shard.row_end, columns] = part
        if table not in self._places.replicated:
            # Every element is on one rank, and zero on the others.
            self.group.all_reduce_sum(whole)
        return whole

    def resident_bytes(self) -> int:
        """Return the bytes that weights and optimizer rows take on this rank now."""
        return sum(b.resident_bytes for store in self._all_stores() for b in store.buffers())


def _axis(mesh: DeviceMesh | None, name: str, size: int) -> Collectives:
    group = mesh.get_group(name) if mesh is not None and size > 1 else None
    return Collectives(group, size)


def _check_ranks(plan: TablePlan, world: World) -> None:
    if plan.ranks != world.size:
        raise ConfigError(
            refusal(
                OP,
                "plan",
                must=f"be for the {world.size} ranks that there are",
                got=f"{plan.ranks} = {plan.table_shard} * {plan.table_replicate}",
                fix="start as many ranks as the plan asks for, or plan anew",
            )
        )
