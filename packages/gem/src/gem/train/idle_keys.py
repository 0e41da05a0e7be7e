"""Keys of a recipe's ``[parallel]`` that change nothing in a run, so that it can say so."""

import torch

from gem.model.gem import GemLayer
from gem.train.parallel_spec import ParallelSpec
from gem.train.step import TrainStep
from gem_opkit.errors import UnsupportedError, refusal


def refuse_copies(plan: ParallelSpec, device: torch.device) -> None:
    """Refuse copy engines where there are none, whether or not weights are cut.

    Args:
        plan: on the ranks that there are.
        device: of this rank.

    Raises:
        UnsupportedError: names the key.
    """
    if plan.gathers == "copy_engine" and device.type != "cuda":
        raise UnsupportedError(
            refusal(
                "recipe",
                "parallel.gathers",
                must='be "nccl" or "measured" here',
                got=f'"copy_engine"; the ranks compute on {device.type}, which has no copy engines',
                fix='take "measured", which uses NCCL where it has to',
            )
        )


def idle_keys(step: TrainStep) -> list[str]:
    """What the plan of a step asks for and cannot have any effect.

    Args:
        step: built, on this rank.

    Returns:
        a line for each such key: its name, its value, and why.
    """
    plan, found = step.plan, list[str]()
    # With weights that are cut, what chooses the way says which one it is.
    sliced = plan.fully_sharded_tables and plan.table_replicate > 1 and step.engine is not None
    if plan.gathers != "nccl" and not step.gathers and not sliced:
        why = ""
        if plan.shard == 1:
            why = "parallel.shard is 1"
        elif max(step.sizes.values(), default=0) < plan.replicate_below:
            why = f"all weights are below parallel.replicate_below={plan.replicate_below}"
        if why:
            found.append(f"parallel.gathers={plan.gathers} copies nothing: {why}")
    if plan.table_wire_dtype != "fp32" and step.engine is None:
        found.append(
            f"parallel.table_wire_dtype={plan.table_wire_dtype} changes nothing: every rank holds "
            "all tables"
        )
    if plan.reduce_dtype != "fp32" and not step.world.grouped:
        found.append(
            f"parallel.reduce_dtype={plan.reduce_dtype} changes nothing: gradients of one rank are "
            "summed with nobody's"
        )
    if plan.shard == plan.expert == 1 and step.world.way is None:
        named = {
            "gather_dtype=bf16": plan.gather_dtype != "fp32",
            "keep_gathered=true": plan.keep_gathered,
        }
        found += [
            f"parallel.{text} changes nothing: parallel.shard and parallel.expert are 1"
            for text, is_set in named.items()
            if is_set
        ]
    if plan.overlap_sides:
        layers = [part for part in step.model.modules() if isinstance(part, GemLayer)]
        if not any(layer.kind == "transformer" for layer in layers):
            found.append(
                "parallel.overlap_sides=true changes nothing: the model has no transformer layers"
            )
        elif step.world.device.type != "cuda":
            found.append(
                "parallel.overlap_sides=true changes nothing: there is one stream on "
                f"{step.world.device.type}"
            )
    return found
