"""The ``torch`` engine: sharded tables on torch.distributed alone, for every plan and any device.

A call runs in two halves. ``start`` numbers, sorts and sends the ids; ``forward`` reads the rows at
their owners, sends vectors back and pools them. The backward pass sends the gradients of the
different rows to the owners, which merge and move them, or hold them until they are told to. Fully
sharded, the rows are gathered over the sharding groups before they are read or moved, and their
mean is scattered back afterwards; where groups exchange gradients, each keeps its slice.

Left out: rows that do not fit in device memory.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gem_embeddings.contract import LookupSpec, OptimizerSpec, RowDtype, TablePlan, TableSpec
from gem_embeddings.counters import TableCounts
from gem_embeddings.engine import Exchanged, StartedLookup, TableEngine, Update
from gem_embeddings.sharded.calls import (
    Exchange,
    Pool,
    Started,
    check_ranks,
    check_started,
    refused_elsewhere,
)
from gem_embeddings.sharded.collectives import Collectives
from gem_embeddings.sharded.direct import Direct, Part, Pending
from gem_embeddings.sharded.exchange import Arrived, IdExchange
from gem_embeddings.sharded.gradients import HeldGradients, ReplicaGradients, RowGradients
from gem_embeddings.sharded.moves import RowMoves
from gem_embeddings.sharded.places import OP, TORCH_DTYPE, places_of
from gem_embeddings.sharded.replicas import Gathered, Replicas
from gem_embeddings.sharded.requests import Features
from gem_embeddings.sharded.rows import Rows
from gem_embeddings.sharded.state import load_pieces, state_of
from gem_embeddings.sharded.to_host import ToHost
from gem_embeddings.sharded.traffic import Traffic
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.copy_engine.choose import GatherChoice
from gem_parallel.copy_engine.slices import SliceGathers
from gem_parallel.launch import World
from gem_parallel.mesh import table_mesh


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
        update: when rows move.
        replicas: what sharding groups exchange.
        single_pass: a step has one backward pass; see ``build_tables``.
        gathers: how slices of fully sharded rows are gathered.

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
        device once a call, to learn the sizes of these messages, unless the call was started ahead
        and they have come meanwhile; vectors may be fetched ahead too. A single rank waits only
        where a table refuses ids outside, or holds the gradients of several passes.
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
        update: Update = "backward",
        replicas: Exchanged = "weights",
        single_pass: bool = False,
        gathers: GatherChoice | None = None,
    ) -> None:
        super().__init__()
        check_ranks(plan, world)
        self.update, self.replicas_exchange = update, replicas
        self.world, self.plan, self.optimizer = world, plan, optimizer
        self.specs = tuple(specs)
        self.step = 0
        self._lr = optimizer.lr
        self._device = device
        self._places = places_of(specs, plan, optimizer)
        self._features = Features(specs, lookups, self._places.first_key, device)
        if mesh is None and world.grouped:
            mesh = table_mesh(
                world.device.type, plan.table_shard, plan.table_replicate, plan.table_copies
            )
        self.mesh = mesh
        self._rank, replica = plan.place_of(world.rank)
        self.group = Collectives.over(
            mesh, "table_shard", plan.table_shard, alone=world.way is not None
        )
        self.replicas = Collectives.over(mesh, "table_replicate", plan.table_replicate)
        # Groups move rows alike: there are no means of rows to form.
        alike = replicas == "gradients" and plan.table_replicate > 1
        sliced = plan.fully_sharded and plan.table_replicate > 1
        copies = None
        if sliced and gathers is not None and gathers.way != "nccl" and self.replicas.group:
            copies = SliceGathers(self.replicas.group, device, gathers)
        self._rows = Rows(
            self._places,
            self._rank,
            optimizer,
            Replicas(self.replicas, replica, plan.table_replicate, sliced, copies),
            alike=alike,
            device=device,
            seed=seed,
        )
        self._ids = IdExchange(self._places, self._rank, self.group, device)
        wire = TORCH_DTYPE[wire_dtype]
        self._traffic = Traffic(
            self._places,
            self._rank,
            self._ids,
            self.group,
            self._rows.stores,
            self._rows.copies,
            wire=wire,
            device=device,
        )
        self._moves = RowMoves(
            self._places,
            self._rank,
            self.group,
            self._rows.stores,
            optimizer,
            others=ReplicaGradients(self.replicas, replica, wire) if alike else None,
            ranks=plan.table_shard * (plan.table_replicate if alike else 1),
            seed=seed,
        )
        self._held = HeldGradients(plan.table_shard, wire if alike else None)
        # A group of one rank has nobody to send to. Where gradients of several passes are held, or
        # are exchanged, the different rows have to be picked out all the same.
        at_once = update == "backward" or (single_pass and world.size == 1)
        self._direct = (
            Direct(
                self._places, self._rows.all, self._features, optimizer, seed=seed, device=device
            )
            if not self.group.talks and at_once and not alike
            else None
        )
        self._rounds = False
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

    def round_vectors(self) -> bool:
        """Give vectors in bf16 under autocast; see ``TableEngine``."""
        self._rounds = self.reads_ahead and self._device.type == "cuda"
        return self._rounds

    @property
    def reads_ahead(self) -> bool:
        """See ``TableEngine``: on one rank, with rows pooled where they lie."""
        return self._direct is not None and self.world.size == 1

    @property
    def starts_ahead(self) -> bool:
        """See ``TableEngine``: where ids travel, the sizes of the messages come meanwhile."""
        return self.reads_ahead or self.group.talks

    @property
    def waits(self) -> int:
        """How often sizes had not come when they were needed, so that the host waited."""
        others = self._moves.others
        return self._ids.waits + (0 if others is None else others.waits)

    def start_ahead(self, ids: Mapping[str, Jagged]) -> Started:
        """Start a call of a step that is yet to come; see ``TableEngine``."""
        if not self.starts_ahead:
            raise self._not_ahead("start_ahead", "starts_ahead")
        counts = self._features.counts
        before = counts.set_aside()
        try:
            started = self._start(ids, {}, settle=False)
        finally:
            counted = counts.set_aside()
            counts.add_all(before)
        started.counted = counted
        return started

    @torch.no_grad()
    def read_ahead(self, started: StartedLookup) -> None:
        """Read the rows of a started call before ``forward`` does; see ``TableEngine``."""
        if not self.reads_ahead or not isinstance(started, Started):
            raise self._not_ahead("read_ahead", "reads_ahead")
        if started.parts is not None:  # else it goes the long way, which reads in ``forward``
            weights = cast("Direct", self._direct).weights(started.request, started.parts)
            started.pooled = self.pool(started.parts, weights, rounds=self._rounds)

    @property
    def fetches_ahead(self) -> bool:
        """See ``TableEngine``: where ids travel, of rows that are whole between steps."""
        return self.group.talks and not self.plan.fully_sharded

    @torch.no_grad()
    def fetch_ahead(self, started: StartedLookup) -> None:
        """Fetch the vectors of a started call before ``forward`` does; see ``TableEngine``."""
        if not self.fetches_ahead or not isinstance(started, Started):
            raise self._not_ahead("fetch_ahead", "fetches_ahead")
        self._finish(started)
        arrived = started.finished
        # A batch that a rank refuses is refused when it is looked up.
        if arrived is not None and not arrived.refused:
            if arrived.work is not None:
                arrived.work.wait()
                arrived.work = None
            started.vectors = self.fetch(arrived)

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
        self._settle(started)
        started.looked_up = True
        if started.counted is not None:
            self._features.counts.add_all(started.counted)
        if started.parts is not None:
            return self._pool(started, started.parts)
        arrived = cast("Arrived", started.arrived)
        if arrived.work is not None:
            arrived.work.wait()
            arrived.work = None
        others = self._moves.others
        if others is not None and torch.is_grad_enabled() and not self._rows.copies:
            started.told = others.tell(self._traffic.asked_for(arrived))
        # Typed by hand: torch gives the apply of a Function no type.
        exchange: Any = Exchange.apply
        vectors = (
            exchange(self._anchor, self, started)
            if torch.is_grad_enabled()
            else self.fetched(started)
        )
        return self._features.outputs(
            started.request, vectors, self._local_places(started), arrived.asked
        )

    def _start(
        self, ids: Mapping[str, Jagged], weights: Mapping[str, Tensor], *, settle: bool = True
    ) -> Started:
        mark = self._features.counts.mark()
        fault: Exception | None = None
        try:
            request = self._features.request(ids, weights, count=self.training)
        except Exception as error:  # noqa: BLE001 - raised below, whatever it is
            # The others are told before it is raised: they wait for this rank.
            fault, request = error, self._features.nothing()
        # None where ids have to travel, or have to be picked out all the same.
        parts = self._direct.parts(request) if self._direct is not None and fault is None else None
        if parts is not None and not isinstance(request.refuses, Tensor):
            # Nobody is told anything, so nothing waits for the device.
            if self.training:
                unique_T = cast("Direct", self._direct).different(request.keys_I)
                self._features.counts.add_unique_all(unique_T)
            return Started(self, request, None, parts)
        started = Started(self, request, None, parts)
        started.begun, started.fault = self._ids.begin(request.keys_I, request.refuses), fault
        if settle:
            try:
                self._settle(started)
            except Exception:
                self._features.counts.return_to(mark)
                raise
        return started

    def _finish(self, started: Started) -> None:
        """Send the ids of a call that has begun, unless a rank refuses it."""
        if started.begun is not None:
            begun, started.begun = started.begun, None
            started.finished = self._ids.finish(begun, send_rows=started.parts is None)

    def _settle(self, started: Started) -> None:
        """Send the ids of a call that has begun, or refuse it on all ranks."""
        self._finish(started)
        arrived, started.finished = started.finished, None
        if arrived is None:
            return
        if not arrived.refused:
            started.arrived = arrived
            if self.training:
                for spec, rows in zip(self.specs, arrived.asked, strict=True):
                    self._features.counts.add(spec.name, unique=rows)
            return
        if started.fault is not None:
            raise started.fault
        if arrived.outside:
            raise self._features.refusal(started.request)
        raise refused_elsewhere(self.world, self.plan, arrived.refused)

    def _local_places(self, started: Started) -> Tensor:
        """For each id its place among the rows of its table, or -1."""
        arrived = cast("Arrived", started.arrived)
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
            else self.pooled(started, weights)
        )
        return direct.outputs(started.request, parts, flats)

    def pooled(self, started: Started, weights: Sequence[Tensor | None]) -> list[Tensor]:
        """Give the vectors that were read ahead, or read them now.

        Args:
            started: a call of this rank alone.
            weights: of the ids of each part.

        Returns:
            the flat output of each part.
        """
        found, started.pooled = started.pooled, None
        if found is not None:
            return found
        halves = torch.get_autocast_dtype("cuda") == torch.bfloat16
        rounds = self._rounds and halves and torch.is_autocast_enabled("cuda")
        return self.pool(started.parts or (), weights, rounds=rounds)

    def pool(
        self, parts: Sequence[Part], weights: Sequence[Tensor | None], *, rounds: bool = False
    ) -> list[Tensor]:
        """Pool rows of this rank alone. Collective over the replicas.

        Args:
            parts: of the call.
            weights: of the ids of each part.
            rounds: give outputs in bf16.

        Returns:
            the flat output of each part.
        """
        with self._rows.whole(states=False) as whole:
            whole.wait()
            out_dtype = torch.bfloat16 if rounds else torch.float32
            return cast("Direct", self._direct).look_up(parts, weights, out_dtype=out_dtype)

    @torch.no_grad()
    def learn_directly(
        self,
        parts: Sequence[Part],
        weights: Sequence[Tensor | None],
        grads: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Move rows of this rank alone, or hold their gradients. Collective over the replicas.

        Args:
            parts: of the call.
            weights: of the ids of each part.
            grads: gradients of what ``pool`` returned.

        Returns:
            the gradient of each part's weights, where they need one.
        """
        direct, grads = cast("Direct", self._direct), [g.contiguous() for g in grads]
        if self.update == "step":
            direct.check_alone(self._held.passes)
            direct.hold(parts, weights, grads)
            return direct.weight_gradients(parts, weights, grads)
        with self._rows.whole(states=True) as whole:
            whole.wait()
            found = direct.weight_gradients(parts, weights, grads)
            self._move_directly(Pending(parts, weights, grads))
        return found

    def _move_directly(self, passed: Pending) -> None:
        self.step += 1
        cast("Direct", self._direct).move(passed, lr=self._lr, step=self.step)
        if self.plan.fully_sharded:
            self._rows.average(self.step)

    def fetched(self, started: Started) -> Tensor:
        """Give the vectors that were fetched ahead, or fetch them now. Collective.

        Args:
            started: a settled call.

        Returns:
            as ``fetch``.
        """
        found, started.vectors = started.vectors, None
        return self.fetch(cast("Arrived", started.arrived)) if found is None else found

    def fetch(self, arrived: Arrived) -> Tensor:
        """Fetch the vectors of the rows that a call asks for. Collective.

        Args:
            arrived: the ids of the call.

        Returns:
            flat fp32 vectors, table after table.
        """
        with self._rows.whole(states=False) as whole:
            whole.wait()
            return self._traffic.fetch(arrived)

    @torch.no_grad()
    def learn(self, arrived: Arrived, grad: Tensor, told: ToHost | None = None) -> None:
        """Move the rows that a call asked for, or hold their gradients. Collective.

        Args:
            arrived: the ids of the call.
            grad: gradient of its vectors.
            told: what other sharding groups were told of its rows.
        """
        grad = grad.contiguous()
        if self.update == "step":
            if self._direct is not None:
                self._direct.check_alone()
            # On their way while the dense part sums its gradients up.
            self._held.add(*self._traffic.bring(arrived, grad), told)
            return
        with self._rows.whole(states=True) as whole:
            # Gathered while the gradients travel.
            found, work = self._traffic.bring(arrived, grad)
            work.wait()
            self._move(found, whole, told)

    @torch.no_grad()
    def apply_held(self) -> None:
        """Move rows by the sum of the gradients that are held; see ``TableEngine.apply``."""
        self._check_holds("apply")
        if self._direct is not None and self._direct.pending is not None:
            passed, self._direct.pending = self._direct.pending, None
            self._move_directly(passed)
            return
        if not self._held.passes:
            raise ConfigError(
                refusal(
                    OP,
                    "apply",
                    must="follow a backward pass",
                    got="none since rows moved, or gradients were dropped",
                    fix="call it once a step",
                )
            )
        with self._rows.whole(states=True) as whole:
            told = self._held.told
            self._move(self._held.take(), whole, told)

    def _move(self, found: Sequence[RowGradients], whole: Gathered, told: ToHost | None) -> None:
        self.step += 1
        self._moves.move(found, lr=self._lr, step=self.step, rows_are_there=whole.wait, told=told)
        if self.plan.fully_sharded:
            self._rows.average(self.step)

    def discard(self) -> None:
        """Drop the gradients that are held; see ``TableEngine``."""
        self._check_holds("discard")
        self._drop()

    def _drop(self) -> None:
        self._held.drop()
        if self._direct is not None:
            self._direct.pending = None

    @torch.no_grad()
    def held_finite(self) -> Tensor:
        """Tell whether the gradients held on this rank are finite; see ``TableEngine``."""
        self._check_holds("held_finite")
        found = None if self._direct is None else self._direct.finite()
        return self._held.finite(self._device) if found is None else found

    def _check_holds(self, call: str) -> None:
        if self.update != "step":
            raise ConfigError(
                refusal(
                    OP,
                    call,
                    must='be called where update is "step"',
                    got=repr(self.update),
                    fix="leave it out: rows have moved in the backward pass",
                )
            )

    @torch.no_grad()
    def sync(self) -> None:
        """Replace weights and optimizer rows by their mean over the groups; see ``TableEngine``."""
        if not self.plan.fully_sharded:
            self._rows.average(self.step)

    def gather_ahead(self, *, backward: bool) -> None:
        """Begin to gather fully sharded rows for the next pass. Collective over the replicas.

        By itself a pass gathers when it needs the rows, and waits. Called earlier, where memory for
        the whole is free, this runs beside the dense part: before the dense optimizer's step for
        the next forward pass, and in the dense backward pass, once most activations are gone, for
        that of the tables. Nothing happens where rows are there, or are not cut. Between two GPUs
        of a host it did not pay: the gathers slowed the dense part down by more than they hid.
        Who overwrites ``table_state`` in place afterwards has to call ``load_table_state`` then.

        Args:
            backward: whether optimizer rows are needed too.
        """
        for buffer in self._rows.buffers(states=backward):
            buffer.gather()

    def wait_gathered(self) -> None:
        """Let the current stream wait for what ``gather_ahead`` has begun."""
        for buffer in self._rows.buffers():
            buffer.wait()

    def counters(self) -> dict[str, TableCounts]:
        """Return what this rank asked each table for in training. Waits for a GPU."""
        return self._features.counts.read()

    def table_state(self) -> dict[str, Tensor]:
        """Return what this rank holds; see ``TableEngine``. With replicas call ``sync`` before."""
        return state_of(self.specs, self._rows.all, self.optimizer, self.mesh)

    def load_table_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state; see ``TableEngine``. Gradients that are held are dropped."""
        load_pieces(self.table_state(), state)
        self._drop()
        for buffer in self._rows.buffers():
            buffer.forget()

    @torch.no_grad()
    def full_weight(self, name: str) -> Tensor:
        """Gather one table on every rank of its sharding group. Collective over all ranks."""
        names = [spec.name for spec in self.specs]
        if name not in names:
            raise ConfigError(
                refusal(OP, "name", must=f"be one of {', '.join(names)}", got=name, fix="pick one")
            )
        return self._rows.full_weight(names.index(name), self.group)

    def resident_bytes(self) -> int:
        """Return the bytes that weights and optimizer rows take on this rank now."""
        return self._rows.resident_bytes()
