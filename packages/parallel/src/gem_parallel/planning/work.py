"""What a training step has to do on one rank, in numbers: what a forecast is made from.

Plain data that whoever knows the model fills in (`gem.planning.work` for a recipe). Counts are
those of one rank's batch. Tables come apart, as `TableStep`, because what they cost depends on
how a plan cuts them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gem_opkit.cost import Cost

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
# What of a step a collective of the tables runs beside: nothing, the passes of the model, the norms
# of the dense gradients, or the passes of the dense optimizer.
Hider = Literal["nothing", "model", "norms", "optimizer"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One dense parameter.

    Attributes:
        name: qualified name in the single-process model.
        rows: size of its first dim, which sharding cuts.
        columns: elements of a row.
    """

    name: str
    rows: int
    columns: int = 1

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    def shard_elements(self, shard: int) -> int:
        """Elements of one shard, with the padding that makes all shards equal.

        Args:
            shard: ranks that the first dim is cut over.

        Returns:
            rows of a shard, rounded up, times the elements of a row.
        """
        return -(-self.rows // shard) * self.columns


@dataclass(frozen=True, slots=True)
class Operator:
    """One kind of work within a unit.

    Attributes:
        kind: what it is, which decides how near it comes to the roofline.
        forward: FLOPs and bytes of the forward pass.
        backward: of the backward pass.
    """

    kind: str
    forward: Cost
    backward: Cost


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert of a mixture.

    Attributes:
        parameters: its own.
        operators: its work on one rank's batch.
        kept_bytes: what it keeps for its backward pass, of one rank's batch.
        input_bytes: what it reads of one rank's batch, which travels if another rank keeps it.
    """

    parameters: tuple[Parameter, ...]
    operators: tuple[Operator, ...]
    kept_bytes: int
    input_bytes: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the model whose parameters are gathered together, in the order of the forward pass.

    Attributes:
        name: qualified name of the submodule.
        parameters: without those of the experts.
        operators: work without that of the experts.
        kept_bytes: what it keeps for its backward pass, without the experts.
        experts: experts that it runs on the same examples and sums; none for most units.
        output_bytes: sum over experts, of one rank's batch, which travels back.
        beside: name of the unit before it that it runs beside, on a stream of its own, because it
            reads nothing of it; None for a unit that waits for the one before.
    """

    name: str
    parameters: tuple[Parameter, ...]
    operators: tuple[Operator, ...]
    kept_bytes: int = 0
    experts: tuple[Expert, ...] = ()
    output_bytes: int = 0
    beside: str | None = None

    def all_operators(self) -> tuple[Operator, ...]:
        """Its own work and that of every expert.

        Returns:
            its own first, then expert by expert.
        """
        return (*self.operators, *(op for expert in self.experts for op in expert.operators))


@dataclass(frozen=True, slots=True)
class Work:
    """A training step of one rank, without its tables.

    Attributes:
        name: of the recipe.
        units: in the order of the forward pass.
        examples: examples of one rank.
        tokens: events of one rank, on average.
        parameter_bytes: bytes of an element as it is stored, gathered and reduced.
        compute_bytes: bytes of an element as products read it; where it is less, weights that are
            whole on a rank have copies that the optimizer writes, and of others copies are made in
            the forward pass and kept until the backward pass has used them.
        state_bytes: optimizer state of an element.
        input_bytes: batch on the device.
        spread: standard deviation of a rank's compute time over its mean, because histories
            differ in length.
        slowest: number of ranks -> expected work of the heaviest one over the mean, where batches
            are balanced; None: what ``spread`` says.
        table_copy_bytes: vectors that lookups return, which exist until they have been used.
        scratch_bytes: what the backward pass of the widest operator needs.
        micro_batches: parts that a rank's batch is run in, one after the other.
    """

    name: str
    units: tuple[Unit, ...]
    examples: int
    tokens: float
    parameter_bytes: int = 4
    compute_bytes: int = 4
    state_bytes: int = 8
    input_bytes: int = 0
    spread: float = 0.0
    slowest: Callable[[int], float] | None = None
    table_copy_bytes: int = 0
    scratch_bytes: int = 0
    micro_batches: int = 1

    def flops(self) -> int:
        """Model FLOPs of one rank's batch, forward and backward.

        Returns:
            a multiply and an add are two.
        """
        return sum(
            op.forward.flops + op.backward.flops
            for unit in self.units
            for op in unit.all_operators()
        )

    def parameters(self) -> tuple[Parameter, ...]:
        """Every dense parameter of the model.

        Returns:
            unit by unit, those of experts behind the unit's own.
        """
        return tuple(
            parameter
            for unit in self.units
            for group in (unit.parameters, *(expert.parameters for expert in unit.experts))
            for parameter in group
        )


@dataclass(frozen=True, slots=True)
class TableTraffic:
    """A collective of the tables in one step.

    Attributes:
        what: what travels.
        axis: ``table_shard``, ``table_replicate`` or ``world``.
        collective: its name.
        given_bytes: what one rank gives in a step, mean over ranks.
        ms: time of the most loaded rank; None to have it computed from the bytes.
        beside: what it runs beside; what is left over when that has ended is waited for.
    """

    what: str
    axis: str
    collective: Collective
    given_bytes: float
    ms: float | None = None
    beside: Hider = "nothing"


@dataclass(frozen=True, slots=True)
class TableStep:
    """What tables cost one rank in a step under one plan.

    Attributes:
        local_ms: reading and updating rows, pooling and merging, on the most loaded rank.
        traffic: every collective.
        held_bytes: weights and optimizer rows between steps, of the fullest rank.
        gathered_bytes: copies that exist beside them while rows are read or moved.
        buffer_bytes: ids, vectors and gradients that travel.
        cut: how many tables are cut how, for people.
        whole: whether every rank holds all tables and nothing but the trainer's own merge of
            gradients is between them.
    """

    local_ms: float = 0.0
    traffic: tuple[TableTraffic, ...] = ()
    held_bytes: int = 0
    gathered_bytes: int = 0
    buffer_bytes: int = 0
    cut: Mapping[str, int] = field(default_factory=dict)
    whole: bool = False
