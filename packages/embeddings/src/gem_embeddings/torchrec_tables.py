"""Sharded tables on torchrec and fbgemm: the engine for production, behind the common contract.

Pooled features go through ``EmbeddingBagCollection``, unpooled ones through
``EmbeddingCollection``, both with fbgemm's fused tables, sharded by ``DMPCollection``. Ids are
checked, hashed and brought into range before torchrec sees them, so that it meets none that it
would treat otherwise than the other engine; means are divided after it for the same reason. Tables
that several ranks of a group hold whole are left to the engine ``torch``.

Left out, and refused by name: what ``gem_embeddings.torchrec_engine`` refuses in ``placing`` and
``configs``, and gradients of the weights of ids that torchrec pools, which it drops on their way
between ranks.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gem_embeddings.contract import LookupSpec, OptimizerSpec, RowDtype, TablePlan, TableSpec
from gem_embeddings.counters import TableCounters, TableCounts
from gem_embeddings.engine import Exchanged, StartedLookup, TableEngine, Update
from gem_embeddings.initial import fill_initial
from gem_embeddings.inputs import features_of_tables
from gem_embeddings.sharded.engine import TorchTables
from gem_embeddings.sharded.state import load_pieces
from gem_embeddings.torchrec_engine.agreement import agree
from gem_embeddings.torchrec_engine.api import make_collection, torchrec_api
from gem_embeddings.torchrec_engine.batches import Batches
from gem_embeddings.torchrec_engine.calls import Started, checked_started
from gem_embeddings.torchrec_engine.configs import (
    collect_tables,
    make_module,
    make_plan,
    make_sharders,
    moment_factor,
)
from gem_embeddings.torchrec_engine.placing import (
    OP,
    host_ranks,
    place_tables,
    refuse,
    replicated_tables,
)
from gem_embeddings.torchrec_engine.shards import ROW_DTYPES, find_shards, kernels_of, state_of
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import SPARSE_AXES
from gem_parallel.launch import World


class TorchrecTables(TableEngine):
    """Tables sharded by torchrec.

    Args:
        specs: the tables; names differ.
        lookups: features whose pooling differs from their table's, or that no table names.
        plan: where every table lies.
        optimizer: ``rowwise_adagrad``, ``adagrad`` or ``sgd``.
        world: the ranks. torchrec needs a process group on one rank too: where there is none, one
            of this process alone is made, and stays.
        device: of the tables.
        wire_dtype: format in which vectors and their gradients travel.
        seed: of the initial weights.
        mesh: axes (table_shard, table_replicate) over all ranks; None makes one.
        update: ``backward``: fbgemm moves rows there.
        replicas: ``weights``, or with one sharding group either.

    Raises:
        ConfigError: a plan for other ranks or tables, or specs that contradict each other.
        UnsupportedError: torchrec does not load, or cannot do what is asked for.

    Numerics: rows and sums in fp32, as fbgemm orders them. Rows in fp16 are updated with fbgemm's
        stochastic rounding on CUDA, and to nearest on a CPU.
    Cost: besides torchrec's own exchanges, one all-reduce of a few numbers a call: whether a rank
        refuses its ids, and the largest batch, to which all ranks pad (with empty examples). It
        waits for the host; on CUDA it travels over gloo.
    """

    def __init__(  # noqa: PLR0913 - as build_tables
        self,
        specs: Sequence[TableSpec],
        lookups: Sequence[LookupSpec],
        plan: TablePlan,
        optimizer: OptimizerSpec,
        world: World,
        *,
        device: torch.device | str | None = None,
        wire_dtype: RowDtype = "fp32",
        seed: int = 0,
        mesh: DeviceMesh | None = None,
        update: Update = "backward",
        replicas: Exchanged = "weights",
    ) -> None:
        super().__init__()
        if update != "backward":
            refuse("update", 'be "backward", where fbgemm moves rows,', repr(update))
        if replicas != "weights" and plan.table_replicate > 1:
            refuse("replicas", 'be "weights" between sharding groups', repr(replicas))
        self.update, self.replicas_exchange = update, replicas
        self.world, self.plan, self.specs = world, plan, tuple(specs)
        self.optimizer, self.step = optimizer, 0
        self.device = torch.device(world.device if device is None else device)
        if plan.ranks != world.size:
            raise ConfigError(
                refusal(
                    OP,
                    "plan.ranks",
                    must=f"be the {world.size} ranks of the world",
                    got=plan.ranks,
                    fix="make the plan for as many ranks as there are",
                )
            )
        kind = self.device.type
        tables = place_tables(specs, plan, optimizer, device=kind, wire_dtype=wire_dtype)
        features = features_of_tables(OP, specs, lookups)
        collections = collect_tables(tables, features)
        self._batches = Batches(specs, lookups, self.device)
        torchrec_api()
        _join_alone(world, self.device)
        # Whether a batch is refused is told from host memory.
        self._talk: Any = None if kind == "cpu" else dist.new_group(backend="gloo")
        module = torch.nn.Module()
        for part in collections:
            module.add_module(part.name, make_module(part, tables, features))
        # In tuples torch takes them for no part of this module: rows are no parameters, and no
        # optimizer of a dense part may find them.
        self._parallel: tuple[Any, ...] = ()
        if collections:
            parallel = make_collection(
                module,
                make_plan(collections, tables, kind),
                make_sharders(optimizer, wire_dtype, kind),
                device=self.device,
                world_size=world.size,
                group_size=plan.table_shard,
                host_ranks=host_ranks(plan),
            )
            self._parallel = (parallel,)
            module = parallel.module
        self._collections = tuple((part, getattr(module, part.name)) for part in collections)
        if mesh is None and world.size > 1:
            sizes = (plan.table_shard, plan.table_replicate)
            mesh = init_device_mesh(kind, sizes, mesh_dim_names=SPARSE_AXES)
        self._mesh = mesh
        self._tables = tables
        self._kernels = kernels_of([sharded for _, sharded in self._collections])
        self._held = find_shards(self._kernels, tables, optimizer)
        for shard in self._held:
            fill_initial(
                shard.weight_RE,
                tables[shard.table].spec,
                seed=seed,
                row_start=shard.row_start,
                column_start=shard.column_start,
            )
        self._lr = optimizer.lr
        away = replicated_tables(plan)
        self._replicated: tuple[TorchTables, ...] = ()
        if away:
            self._replicated = (
                TorchTables(
                    [spec for spec in specs if spec.name in away],
                    [lookup for lookup in lookups if lookup.table_name in away],
                    _plan_of(plan, away),
                    optimizer,
                    world,
                    device=self.device,
                    wire_dtype=wire_dtype,
                    seed=seed,
                    mesh=mesh,
                ),
            )

    @property
    def counts(self) -> TableCounters:
        """What tables were asked for in training; ``unique`` is counted by the lookup."""
        return self._batches.counts

    def set_count_unique(self, *, wanted: bool) -> None:
        """Choose whether different rows are counted; at first they are.

        Args:
            wanted: False leaves ``unique`` where it is. torchrec does not look for different rows,
                so counting them sorts the ids of every step and, on CUDA, waits for that.
        """
        self._batches.count_unique = wanted

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Every feature that ``forward`` needs, table by table."""
        return tuple(self._batches.poolings)

    # ------------------------------------------------------------------------------ lookup

    def start(
        self, ids: Mapping[str, Jagged], weights: Mapping[str, Tensor] | None = None
    ) -> StartedLookup:
        """Check ids and send them to the ranks that hold their rows; see ``TableEngine``."""
        weights = {} if weights is None else weights
        mark = self.counts.mark()
        fault: Exception | None = None
        started = Started({})
        try:
            started.asked = self._batches.ask(ids, weights, count=self.training)
            self._refuse_gradients(weights)
        except Exception as own:  # noqa: BLE001 - raised by agree, whatever it is
            # The others are told before it is raised: they wait for this rank.
            fault = own
        asked = started.asked
        try:
            agreed = agree(
                self.world,
                self._talk,
                examples=max((one.batch.batch for one in asked.values()), default=0),
                weighted=[
                    any(n in weights for n in part.features) for part, _ in self._collections
                ],
                fault=fault,
            )
        except Exception:
            self.counts.return_to(mark)
            raise
        api = torchrec_api()
        with torch.no_grad():
            for (part, module), weighted in zip(self._collections, agreed.weighted, strict=True):
                parts = [asked[name] for name in part.features]
                keyed = api.KeyedJaggedTensor(
                    keys=list(part.keys),
                    values=torch.cat([one.rows_I for one in parts]),
                    lengths=torch.cat([one.padded_lengths(agreed.examples) for one in parts]),
                    # Vectors that are pooled here are weighted here.
                    weights=torch.cat([one.sent_weight_I for one in parts])
                    if weighted and part.pooled
                    else None,
                    stride=agreed.examples,
                )
                context = module.create_context()
                started.contexts.append(context)
                # The first wait is for the sizes; the ids themselves are under way after it.
                started.arriving.append(module.input_dist(context, keyed).wait())
        for engine in self._replicated:
            names = engine.feature_names
            started.replicated = engine.start(
                {name: ids[name] for name in names},
                {name: weight for name, weight in weights.items() if name in names},
            )
        return started

    def forward(
        self,
        ids: Mapping[str, Jagged] | StartedLookup,
        weights: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Look up every feature of this rank's own batch; see ``TableEngine``."""
        # Left out of compiled graphs, which cannot hold sizes that a collective tells.
        look_up: Any = self._look_up
        return look_up(ids, weights)

    @torch.compiler.disable
    def _look_up(
        self,
        ids: Mapping[str, Jagged] | StartedLookup,
        weights: Mapping[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        if isinstance(ids, StartedLookup):
            started = checked_started(ids, weights)
        else:
            started = checked_started(self.start(ids, weights), None)
        started.used = True
        outputs: dict[str, Tensor] = {}
        moved: list[Tensor] = []
        for (part, module), context, arriving in zip(
            self._collections, started.contexts, started.arriving, strict=True
        ):
            out = module.compute_and_output_dist(context, arriving.wait()).wait()
            for key, value in (out.to_dict() if part.pooled else out).items():
                name = part.keys[key]
                found = value if part.pooled else value.values()
                moved.append(found)
                asked = started.asked[name]
                outputs[name] = self._batches.output(name, asked, found, pooled=part.pooled)
        for engine in self._replicated:
            engine.step = self.step
            found = engine(started.replicated)
            moved += found.values()
            outputs |= found
        learning = [value for value in moved if value.requires_grad]
        if learning:
            torch.autograd.graph.register_multi_grad_hook(learning, self._count_step, mode="any")
        return {name: outputs[name] for name in self.feature_names}

    def _count_step(self, _: Tensor) -> None:
        self.step += 1

    def _refuse_gradients(self, weights: Mapping[str, Tensor]) -> None:
        if not torch.is_grad_enabled():
            return
        for part, _ in self._collections:
            for name in part.features:
                if part.pooled and name in weights and weights[name].requires_grad:
                    refuse(f"weights[{name!r}]", "need no gradient", "requires_grad=True")

    # ------------------------------------------------------------------------------ learning

    def apply_held(self) -> None:
        """Refuse: rows have moved in the backward pass."""
        self._refuse_held("apply")

    def discard(self) -> None:
        """Refuse: rows have moved in the backward pass."""
        self._refuse_held("discard")

    def held_finite(self) -> Tensor:
        """Refuse: rows have moved in the backward pass."""
        self._refuse_held("held_finite")

    def _refuse_held(self, call: str) -> NoReturn:
        refuse(call, 'be called where update is "step", which there is not', "a call")

    def sync(self) -> None:
        """Replace weights and optimizer rows by their mean over the groups; see ``TableEngine``."""
        if self.plan.table_replicate > 1:
            for whole in (*self._parallel, *self._replicated):
                whole.sync()

    @property
    def lr(self) -> float:
        """Learning rate of the next forward pass and of its backward pass."""
        return self._lr

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next forward pass and of its backward pass.

        fbgemm reads it when rows are looked up: between forward and backward it is too late.

        Args:
            lr: at least 0.

        Raises:
            ConfigError: negative or not finite.
        """
        if not 0 <= lr < math.inf:
            raise ConfigError(
                refusal(OP, "lr", must="be at least 0 and finite", got=lr, fix="pass another")
            )
        self._lr = lr
        for kernel, _ in self._kernels:
            kernel.set_learning_rate(lr * moment_factor(self.optimizer))
        for engine in self._replicated:
            engine.set_lr(lr)

    def counters(self) -> dict[str, TableCounts]:
        """Return what this rank asked each table for in training, since counting began."""
        return self.counts.read()

    # ------------------------------------------------------------------------------ state

    def table_state(self) -> dict[str, Tensor]:
        """Return what this rank holds, for a checkpoint; see ``TableEngine``."""
        placed = [table.spec for table in self._tables]
        state = state_of(self._held, placed, self.optimizer, self._mesh, self.device)
        for engine in self._replicated:
            state |= engine.table_state()
        return state

    def load_table_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state; see ``TableEngine``."""
        load_pieces(self.table_state(), state)

    def full_weight(self, name: str) -> Tensor:
        """Gather one table on every rank of its sharding group; see ``TableEngine``."""
        names = [spec.name for spec in self.specs]
        if name not in names:
            raise ConfigError(
                refusal(OP, "name", must=f"be one of {', '.join(names)}", got=repr(name), fix="")
            )
        for engine in self._replicated:
            if name in [spec.name for spec in engine.specs]:
                return engine.full_weight(name)
        placed = [table.spec.name for table in self._tables]
        index = placed.index(name)
        spec = self._tables[index].spec
        dtype = ROW_DTYPES[spec.row_dtype]
        shape = (spec.num_embeddings, spec.embedding_dim)
        whole_RE = torch.zeros(shape, dtype=dtype, device=self.device)
        for shard in self._held:
            if shard.table == index:
                rows = slice(shard.row_start, shard.row_start + shard.weight_RE.shape[0])
                columns = slice(shard.column_start, shard.column_start + shard.weight_RE.shape[1])
                whole_RE[rows, columns] = shard.weight_RE
        if self._mesh is not None:
            # Every element is 0 on all ranks of the group but one.
            dist.all_reduce(whole_RE, group=self._mesh.get_group(SPARSE_AXES[0]))
        return whole_RE


def _join_alone(world: World, device: torch.device) -> None:
    if world.size == 1 and not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _plan_of(plan: TablePlan, names: Sequence[str]) -> TablePlan:
    """The same plan of some of its tables."""
    placements = tuple(p for p in plan.placements if p.table_name in names)
    return plan.model_copy(update={"placements": placements})
