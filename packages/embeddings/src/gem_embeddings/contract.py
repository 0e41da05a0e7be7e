"""What embedding tables are, who looks them up, how they learn and where they lie.

Field names of ``TableSpec`` and ``LookupSpec`` follow torchrec where torchrec has the thing. No
torch here: a plan of tables is made and costed without it.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from gem_opkit.contract import Contract

Pooling = Literal["sum", "mean", "none"]
IdSpace = Literal["row", "hash"]
OutOfRange = Literal["error", "clamp", "zero"]


class TableSpec(Contract):
    """One embedding table and the features that look it up."""

    name: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_\-]*$",
        description="name of the table, also the name of its weight in the state dict",
    )
    embedding_dim: int = Field(gt=0, description="elements of a row")
    num_embeddings: int = Field(gt=0, description="rows")
    feature_names: tuple[str, ...] = Field(
        default=(), description="features that look up this table with its own pooling"
    )
    pooling: Pooling = Field(
        default="sum",
        description="how the ids of an example become one vector; none keeps one vector an id",
    )
    id_space: IdSpace = Field(
        default="row", description="row: an id is a row; hash: any int64 id is hashed to a row"
    )
    hash_seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="seed of the hash, so that two tables collide in different ids",
    )
    out_of_range: OutOfRange = Field(
        default="error",
        description="what becomes of an id outside the rows: an error, the nearest row, or a "
        "vector of zeros; the last two are counted",
    )
    init_std: float | None = Field(
        default=None,
        ge=0,
        description="standard deviation of normal initial weights; None draws them uniformly "
        "within ±sqrt(1 / num_embeddings)",
    )

    @model_validator(mode="after")
    def _features_differ(self) -> Self:
        repeated = sorted({n for n in self.feature_names if self.feature_names.count(n) > 1})
        if repeated:
            raise ValueError(f"feature_names must differ; got {', '.join(repeated)} twice")
        return self

    @property
    def weight_bytes(self) -> int:
        """Bytes of the table's fp32 weights."""
        return 4 * self.num_embeddings * self.embedding_dim


class LookupSpec(Contract):
    """How one feature looks up a table, where that differs from the table's own pooling."""

    feature_name: str = Field(min_length=1, description="feature that carries the ids")
    table_name: str = Field(description="name of the table that it looks up")
    pooling: Pooling = Field(default="none", description="as in TableSpec, for this feature")


class OptimizerSpec(Contract):
    """How the rows of tables learn. Rows that no id of a batch has hit never move."""

    kind: Literal["rowwise_adagrad", "adam"] = Field(
        default="rowwise_adagrad",
        description="rowwise_adagrad: one accumulator a row; adam: two moments an element",
    )
    lr: float = Field(default=0.02, gt=0, description="learning rate")
    eps: float = Field(default=1e-8, gt=0, description="added to the square root")
    beta1: float = Field(
        default=0.9, ge=0, lt=1, description="decay of adam's first moment; unused by adagrad"
    )
    beta2: float = Field(
        default=0.999, ge=0, lt=1, description="decay of adam's second moment; unused by adagrad"
    )

    def state_bytes(self, table: TableSpec) -> int:
        """Return the bytes of the state that this optimizer keeps for a table.

        Args:
            table: the table.

        Returns:
            bytes, without the step counter.
        """
        if self.kind == "rowwise_adagrad":
            return 4 * table.num_embeddings
        return 2 * table.weight_bytes


class TablePlacement(Contract):
    """Where the rows of one table lie."""

    table_name: str = Field(description="name of the table")
    placement: Literal["replicated"] = Field(
        default="replicated", description="replicated: every rank holds all rows"
    )
    rank_bytes: int = Field(ge=0, description="bytes of weights and optimizer state a rank")


class TablePlan(Contract):
    """Where every table lies."""

    ranks: int = Field(gt=0, description="ranks that train together")
    placements: tuple[TablePlacement, ...] = Field(description="one for each table")

    @property
    def rank_bytes(self) -> int:
        """Bytes of weights and optimizer state that one rank holds."""
        return sum(placement.rank_bytes for placement in self.placements)
