"""Keep a training step within the recipe's memory: the plan is made of the first batch."""

import logging

import torch
from torch import nn

from gem.config import RunConfig
from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.memory.packing import packing_of
from gem.memory.regions import memory_regions
from gem.memory.table import memory_line, memory_text
from gem_opkit.errors import ConfigError, UnsupportedError, refusal
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.launch import World
from gem_parallel.recompute.apply import Recomputing, recompute_by
from gem_parallel.recompute.choose import RecomputePlan, choose
from gem_parallel.recompute.profile import Profile

_log = logging.getLogger(__name__)


class MemoryLimit:
    """What ``[memory]`` asks for. Does nothing where it asks for nothing.

    Args:
        config: the run.
        schema: of the batches.
        model: that will be trained; its regions are looked up.
        world: the ranks.

    Attributes:
        plan: once it is made.
        profile: that it was made from.
        recomputing: the model under the plan.

    Raises:
        UnsupportedError: a model or a plan of ranks that regions cannot be run again in.
    """

    def __init__(
        self, config: RunConfig, schema: BatchSchema, model: nn.Module, world: World
    ) -> None:
        self._config, self._schema, self._world = config, schema, world
        self.wanted = config.memory.budget_gib is not None or config.memory.kept != "as_is"
        self.plan: RecomputePlan | None = None
        self.profile: Profile | None = None
        self.recomputing: Recomputing | None = None
        self._told = False
        if self.wanted:
            check_combined(config)
            memory_regions(model)

    def news(self) -> str | None:
        """The plan in a line, once; None where there is nothing new to tell."""
        if self.plan is None or self._told:
            return None
        self._told = True
        return memory_line(self.plan)

    def prepare(self, model: nn.Module, batch: ExampleBatch, *, count_weights: bool = True) -> None:
        """Make the plan, once, and let the model follow it. Every rank has to call it.

        Args:
            model: on this rank, sharded or not.
            batch: that one forward pass gets. Batches with more events keep more, in proportion.
            count_weights: count copies of weights in bf16, where every forward pass makes them.

        Raises:
            ConfigError: the budget is less than the least that some rank needs.
        """
        if not self.wanted or self.recomputing is not None:
            return
        # Here: it builds the model in name, for which it needs the step that this is a part of.
        from gem.memory.profiling import profile_of

        memory = self._config.memory
        packing = packing_of(memory.kept)
        self.profile = profile_of(
            self._config,
            self._schema,
            batch,
            packing=packing,
            count_weights=count_weights,
        )
        budget = None if memory.budget_gib is None else int(memory.budget_gib * 2**30)
        fault: ConfigError | None = None
        try:
            self.plan = choose(self.profile, budget)
        except ConfigError as refused:
            fault = refused
        failed = all_reduce_sum(
            torch.tensor([int(fault is not None)], device=self._world.device), self._world
        )
        if fault is not None:
            raise fault
        if self.plan is None or int(failed):
            raise ConfigError(
                refusal(
                    "memory",
                    "budget_gib",
                    must="be enough on every rank",
                    got=f"{memory.budget_gib}, too little for {int(failed)} ranks",
                    fix="see what these say",
                )
            )
        self.recomputing = recompute_by(
            model, self.plan, packing=packing, pack_above_bytes=memory.pack_above_bytes
        )
        if self._world.is_first:
            for line in memory_text(self.profile, self.plan).splitlines():
                _log.info("%s", line)


def check_combined(config: RunConfig) -> None:
    """Refuse what neither a budget nor packed activations go with.

    Args:
        config: the run.

    Raises:
        UnsupportedError: names the key.
    """
    if config.train.compile != "off":
        raise UnsupportedError(
            refusal(
                "memory",
                "train.compile",
                must='be "off" with a memory budget or packed activations: operators of a compiled '
                "part have no names to keep them by",
                got=f'"{config.train.compile}"',
                fix="leave one of the two out",
            )
        )
    plan = config.parallel
    if plan is not None and plan.expert > 1:
        raise UnsupportedError(
            refusal(
                "memory",
                "parallel.expert",
                must="be 1 with a memory budget or packed activations: how many examples an expert "
                "sees depends on the ranks",
                got=plan.expert,
                fix="give the ranks to parallel.shard, or leave [memory] out",
            )
        )
    if plan is not None and plan.overlap_sides:
        raise UnsupportedError(
            refusal(
                "memory",
                "parallel.overlap_sides",
                must="be false with a memory budget or packed activations: what is run again would "
                "change streams",
                got="true",
                fix="leave one of the two out",
            )
        )
