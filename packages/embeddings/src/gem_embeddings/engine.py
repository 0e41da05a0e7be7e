"""What every engine of sharded tables promises, and the door that builds one.

An engine holds the shards of one rank. Its forward pass looks up the rank's own batch in tables
that lie on many ranks; its backward pass moves the rows. Gradients, averages and counts mean the
same in every engine, so that a model and its tests do not know which one they have.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gem_embeddings.contract import LookupSpec, OptimizerSpec, RowDtype, TablePlan, TableSpec
from gem_embeddings.counters import TableCounts
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.launch import World

Engine = Literal["torch", "torchrec"]


class StartedLookup:
    """A lookup whose ids are on their way to the ranks that hold their rows.

    Made by ``TableEngine.start`` and given to ``forward`` once. Rows are read in ``forward``, not
    before, so rows that move in between are read as they are then.
    """


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

    Forward and backward are collective: every rank has to run them equally often and in the same
    order, a rank whose data has ended with empty batches.

    Rows are no parameters: optimizers do not see them, ``to`` does not move them, and
    ``state_dict`` does not hold them. ``gem_embeddings.checkpoint`` saves and loads them.

    Attributes:
        world: the ranks.
        plan: where the tables lie.
        specs: the tables, in the order given.
        optimizer: how rows learn; its ``lr`` is the initial one.
        step: backward passes so far. Set when a checkpoint is loaded.
    """

    world: World
    plan: TablePlan
    specs: tuple[TableSpec, ...]
    optimizer: OptimizerSpec
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

    @abstractmethod
    def sync(self) -> None:
        """Replace weights and optimizer rows by their mean over the sharding groups.

        Collective over all ranks. Nothing happens with one group, or where the plan is fully
        sharded, which keeps the mean at all times.
        """

    @property
    @abstractmethod
    def lr(self) -> float:
        """Learning rate of the next backward pass."""

    @abstractmethod
    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next backward pass.

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
            them changes the tables.
        """

    @abstractmethod
    def load_table_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state; shapes and layout as those of ``table_state``.

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


def build_tables(  # noqa: PLR0913 - the last four are settings of their own
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

    Returns:
        the engine.

    Raises:
        ConfigError: a plan for other ranks or tables, or specs that contradict each other.
        UnsupportedError: what the engine cannot do; the message names table, sharding, engine, and
            the engine that can.
    """
    if engine not in ("torch", "torchrec"):
        raise ConfigError(
            refusal(
                "build_tables",
                "engine",
                must='be "torch" or "torchrec"',
                got=repr(engine),
                fix="choose one of them",
            )
        )
    given: dict[str, Any] = {
        "device": world.device if device is None else torch.device(device),
        "wire_dtype": wire_dtype,
        "seed": seed,
        "mesh": mesh,
    }
    # Imported here: each engine brings what the other does not need, torchrec a compiled library.
    # Any: a type checker that also finds this package installed sees two classes TableEngine.
    made: Any
    if engine == "torch":
        from gem_embeddings.sharded.engine import TorchTables

        made = TorchTables(specs, lookups, plan, optimizer, world, **given)
    else:
        from gem_embeddings.torchrec_tables import TorchrecTables

        made = TorchrecTables(specs, lookups, plan, optimizer, world, **given)
    return made
