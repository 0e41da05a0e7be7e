"""How ranks and tables are laid out: the recipe's ``[parallel]``. Imports no torch."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gem_embeddings.contract import RowDtype, Sharding
from gem_opkit.errors import ConfigError, UnsupportedError, refusal
from gem_parallel.balance.contract import Variant
from gem_parallel.contract import ParallelPlan


class ParallelSpec(ParallelPlan):
    """A plan of ranks, and how the tables of a run follow it: the recipe's ``[parallel]``.

    Where neither ``table_shard`` nor ``table_replicate`` is given, every rank holds all tables;
    where one of them is, the other follows from the product of the dense axes.
    """

    table_engine: Literal["local", "torch", "torchrec"] | None = Field(
        default=None,
        description="what holds the tables: local, every rank all of them; torch, an engine that "
        "shards them; none: local where table_shard is 1 and they are not fully sharded, else "
        "torch. torchrec is refused: its rows move before a step is judged",
    )
    table_replicas: Literal["gradients", "weights"] = Field(
        default="gradients",
        description="what copies of a table part exchange after a step: the gradients of rows, "
        "which gives what one process would learn; or all rows, of which the mean is kept",
    )
    table_wire_dtype: RowDtype = Field(
        default="fp32",
        description="format in which vectors of tables and their gradients travel between ranks, "
        "where an engine holds the tables; rows and sums stay what they are",
    )
    table_memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="GiB of tables that a rank may hold between steps; none: no limit",
    )
    table_sharding: dict[str, tuple[Sharding, ...]] = Field(
        default={}, description="table -> the ways in which it may be cut; others may take any"
    )
    balance: Variant = Field(
        default="off",
        description="base batches of a step that are dealt so that work is even: local, over the "
        "micro-batches of a rank; within_group, over neighbouring ranks; group, over these and "
        "then over all; global, over all ranks",
    )
    base_batch: int = Field(
        default=128, gt=0, description="most consecutive examples that are dealt together"
    )
    balance_group: int = Field(
        default=8, gt=0, description="ranks of a group of balance, such as those of a host"
    )
    gathers: Literal["nccl", "copy_engine", "measured"] = Field(
        default="nccl",
        description="how cut parameters, and slices of fully sharded tables, are gathered: nccl; "
        "copy_engine, by the copy engines of one host's GPUs from 4 MiB a rank on, refused "
        "elsewhere; measured, by these from the size on from which they are faster, timed at the "
        "start, and by NCCL where there are none",
    )
    overlap_sides: bool = Field(
        default=False,
        description="in transformer layers run the experts on a CUDA stream beside the event "
        "streams; for plans that do not shard. Where experts are spread, what they exchange then "
        "travels beside the event streams, too",
    )
    follow_ranks: bool = Field(
        default=False,
        description="on another number of ranks than the plan is for, let replicate and "
        "table_replicate follow it, instead of an error",
    )

    @model_validator(mode="before")
    @classmethod
    def _tables_follow(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        axes = ("replicate", "shard", "expert", "table_shard", "table_replicate")
        sizes: dict[str, Any] = {axis: given[axis] for axis in axes if axis in given}
        if any(type(size) is not int or size < 1 for size in sizes.values()):
            return given  # each has a message of its own
        ranks = math.prod(sizes.get(axis, 1) for axis in axes[:3])
        for axis, other in (("table_replicate", "table_shard"), ("table_shard", "table_replicate")):
            if axis not in sizes and ranks % sizes.get(other, 1) == 0:
                return {**given, axis: ranks // sizes.get(other, 1)}
        return given

    @model_validator(mode="after")
    def _local_tables_are_whole(self) -> Self:
        cut = "table_shard" if self.table_shard > 1 else "fully_sharded_tables"
        if self.table_engine == "local" and (self.table_shard > 1 or self.fully_sharded_tables):
            raise ConfigError(
                refusal(
                    "recipe",
                    "parallel.table_engine",
                    must=f"be an engine, as parallel.{cut} is {getattr(self, cut)}",
                    got='"local", which keeps all tables on every rank',
                    fix='leave it out, or take "torch"',
                )
            )
        return self

    @model_validator(mode="after")
    def _sides_are_whole(self) -> Self:
        if self.overlap_sides and self.shard > 1:
            raise UnsupportedError(
                refusal(
                    "recipe",
                    "parallel.overlap_sides",
                    must="be false where parameters of experts are gathered: their memory is given "
                    "back without waiting for a second stream",
                    got=f"true with parallel.shard={self.shard}",
                    fix="leave it out, or give the ranks to parallel.replicate or parallel.expert",
                )
            )
        return self

    @model_validator(mode="after")
    def _tables_may_be_cut_somehow(self) -> Self:
        for name, kinds in self.table_sharding.items():
            if not kinds:
                raise ConfigError(
                    refusal(
                        "recipe",
                        f"parallel.table_sharding.{name}",
                        must="name a way to cut the table",
                        got="none",
                        fix='name one, such as ["row_wise"], or leave the table out',
                    )
                )
        return self

    @property
    def tables_are_local(self) -> bool:
        """Whether every rank holds all tables, without an engine."""
        if self.table_engine is not None:
            return self.table_engine == "local"
        return self.table_shard == 1 and not self.fully_sharded_tables

    def on_ranks(self, ranks: int) -> "ParallelSpec":
        """The plan for a number of ranks.

        Args:
            ranks: that are there.

        Returns:
            This plan, or with ``follow_ranks`` one whose replicas fit them.

        Raises:
            ConfigError: the plan is for another number of ranks; names every factor.
        """
        if self.world_size == ranks or not self.follow_ranks:
            self.check_world(ranks)
            return self
        for axes in (("shard", "expert"), ("table_shard",)):
            kept = math.prod(getattr(self, axis) for axis in axes)
            if ranks % kept:
                named = " * ".join(f"{axis}={getattr(self, axis)}" for axis in axes)
                raise ConfigError(
                    refusal(
                        "recipe",
                        "parallel.follow_ranks",
                        must=f"have a number of ranks that {named} divides",
                        got=ranks,
                        fix="start another number of ranks, or change the plan",
                    )
                )
        return self.model_copy(
            update={
                "replicate": ranks // (self.shard * self.expert),
                "table_replicate": ranks // self.table_shard,
            }
        )
