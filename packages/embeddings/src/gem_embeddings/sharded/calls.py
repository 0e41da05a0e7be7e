"""One call of the engine: what is kept of it, and how autograd reaches rows that are no inputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gem_embeddings.contract import TablePlan
from gem_embeddings.counters import Mark
from gem_embeddings.engine import StartedLookup
from gem_embeddings.sharded.direct import Part
from gem_embeddings.sharded.exchange import Arrived, Begun
from gem_embeddings.sharded.places import OP
from gem_embeddings.sharded.requests import Request
from gem_embeddings.sharded.to_host import ToHost
from gem_opkit.errors import ConfigError, DataError, refusal
from gem_parallel.launch import World


class Started(StartedLookup):
    """A started call of this engine.

    Attributes:
        pooled: outputs of the parts, where rows were read ahead; None where ``forward`` reads them.
        counted: what is counted when it is looked up, where it was started ahead.
        begun: the ids, where sizes are still on their way to the host.
        finished: what arrived, where nobody has looked yet whether a rank refuses.
        vectors: of the different rows, where they were fetched ahead.
        fault: why this rank refuses them; raised once the other ranks know.
        told: what other sharding groups were told of its rows.
    """

    def __init__(
        self, owner: Any, request: Request, arrived: Arrived | None, parts: list[Part] | None
    ) -> None:
        # One of the two is there, or both.
        self.owner, self.request, self.arrived, self.parts = owner, request, arrived, parts
        self.looked_up = self.learned = False
        self.pooled: list[Tensor] | None = None
        self.begun: Begun | None = None
        self.finished: Arrived | None = None
        self.vectors: Tensor | None = None
        self.fault: Exception | None = None
        self.told: ToHost | None = None
        self.counted: Mark | None = None

    def tensors(self) -> list[Tensor]:
        """Return what the forward pass, the backward pass and the update read on the device.

        Whoever started a call on another stream has to tell the allocator of it.
        """
        found = [self.request.keys_I, *self.request.weights.values(), *(self.pooled or ())]
        for part in self.parts or ():
            found += [part.ids_I, part.bags_O]
        arrived = self.finished or self.arrived
        arrived = arrived if self.begun is None else self.begun.arrived
        if arrived is not None:
            found += [arrived.keys, arrived.places_I, arrived.rows]
            found += [arrived.sent_K, arrived.begin_K, arrived.first_T]
            found += [] if arrived.order is None else [arrived.order]
        if self.vectors is not None:
            found.append(self.vectors)
        if self.counted is not None:
            found += [count for count in self.counted[2:] if count is not None]
        return found

    def begin_to_learn(self) -> None:
        """Refuse a second backward pass."""
        if self.learned:
            raise ConfigError(
                refusal(
                    OP,
                    "backward",
                    must="run once for each forward, because rows learn from it",
                    got="a second one",
                    fix="add the losses up, or look up again",
                )
            )
        self.learned = True


class Exchange(torch.autograd.Function):
    """Vectors of rows forward; backward their gradients, which move the rows or are held."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, engine: Any, started: Started) -> Tensor:
        """Fetch the vectors."""
        ctx.engine, ctx.started = engine, started
        return engine.fetched(started)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        """Move the rows, or hold their gradients."""
        ctx.started.begin_to_learn()
        ctx.engine.learn(ctx.started.arrived, grads[0], ctx.started.told)
        return None, None, None


class Pool(torch.autograd.Function):
    """Outputs of one rank's own rows forward; backward their gradients: rows move, or they wait."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        engine: Any,
        started: Started,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Pool the rows."""
        ctx.engine, ctx.started = engine, started
        ctx.save_for_backward(*weights)
        return tuple(engine.pooled(started, weights))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Move the rows, or hold their gradients."""
        ctx.started.begin_to_learn()
        found = ctx.engine.learn_directly(ctx.started.parts, ctx.saved_tensors, grads)
        return None, None, None, *found


def check_started(started: StartedLookup, weights: Mapping[str, Tensor] | None) -> None:
    """Refuse a lookup that was given twice, or weights that come too late.

    Args:
        started: what ``forward`` got in place of ids.
        weights: what it got besides.

    Raises:
        ConfigError: either of the two.
    """
    if weights is not None:
        raise ConfigError(
            refusal(
                OP,
                "weights",
                must="be given to start, with the ids",
                got="weights in forward",
                fix="leave them out here",
            )
        )
    if isinstance(started, Started) and started.looked_up:
        raise ConfigError(
            refusal(
                OP, "ids", must="be looked up once", got="a second forward", fix="start them anew"
            )
        )


def refused_elsewhere(world: World, plan: TablePlan, ranks: Sequence[int]) -> DataError:
    """Say that other ranks refuse their batch.

    Args:
        world: the ranks.
        plan: of the tables.
        ranks: those that refuse, by their place in the sharding group.

    Returns:
        the error, with their numbers in the world.
    """
    _, replica = plan.place_of(world.rank)
    others = ", ".join(str(plan.world_rank(rank, replica)) for rank in ranks)
    return DataError(
        refusal(
            OP,
            "ids",
            must="be good on every rank of the sharding group",
            got=f"a refusal by rank {others}",
            fix="read that rank's error",
        )
    )


def check_ranks(plan: TablePlan, world: World) -> None:
    """Refuse a plan for another number of ranks.

    Args:
        plan: of the tables.
        world: the ranks.

    Raises:
        ConfigError: their numbers differ.
    """
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
