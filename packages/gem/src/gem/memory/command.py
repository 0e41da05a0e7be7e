"""`gem memory`: what a recipe's step keeps for its backward pass, under one budget or several.

Nothing is trained and no GPU is needed: the model runs in name on a batch that is drawn from what
the recipe declares. On a machine with a GPU the operators are those of the GPU; on a CPU they are
taken as if, which leaves out a few that are fused there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gem.config import RunConfig, load_recipe
from gem.dry_run.count import drawn_batch
from gem.memory.limit import check_combined
from gem.memory.packing import packing_of
from gem.memory.profiling import profile_of
from gem.memory.regions import check_has_regions
from gem.memory.table import memory_json, memory_text
from gem.planning.schema import declared_schema
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.launch import World
from gem_parallel.recompute.choose import RecomputePlan, choose
from gem_parallel.recompute.profile import Profile

_MOST_GIB = 1e6
# Ids and lengths of a batch are real, and take memory of the host.
_MOST_EXAMPLES = 65_536


@dataclass(frozen=True, slots=True)
class MemoryAnswer:
    """What the command answers.

    Attributes:
        config: the recipe.
        examples: of the batch, on one rank.
        events: of all streams of it.
        profile: of one forward pass.
        plans: one for each budget, in the order asked.
    """

    config: RunConfig
    examples: int
    events: int
    profile: Profile
    plans: tuple[RecomputePlan, ...]


def memory_of(
    recipe: str,
    settings: Sequence[str] = (),
    *,
    budgets_gib: Sequence[float] = (),
    batch: int | None = None,
) -> MemoryAnswer:
    """Answer the command.

    Args:
        recipe: name or path.
        settings: keys of it that are replaced, as texts ``a.b=value``.
        budgets_gib: each above 0; none for the recipe's own, or for no bound where it has none.
        batch: examples of a rank; None for the recipe's batch in as many parts as it says.

    Returns:
        the answer.

    Raises:
        ConfigError: a budget below the least, or below 0; a recipe whose data declares nothing.
        UnsupportedError: a model without regions, or a key that a budget does not go with.
    """
    for budget in budgets_gib:
        if not 0 < budget <= _MOST_GIB:
            raise ConfigError(
                refusal("gem memory", "--budget", must=f"be above 0 and at most {_MOST_GIB:g} GiB",
                        got=budget, fix="leave it out for no bound")
            )  # fmt: skip
    if batch is not None and batch > _MOST_EXAMPLES:
        raise ConfigError(
            refusal("gem memory", "--batch", must=f"be at most {_MOST_EXAMPLES} examples of a rank",
                    got=batch, fix="memory grows in proportion: ask for fewer")
        )  # fmt: skip
    config = load_recipe(recipe, settings)
    memory = config.memory
    if budgets_gib or memory.budget_gib is not None or memory.kept != "as_is":
        check_combined(config)  # as the trainer will
    own = config.train.batch_examples // config.train.accumulation_parts
    examples = own if batch is None else batch
    drawn = config.model_copy(
        update={"train": config.train.model_copy(update={"batch_examples": max(1, examples)})}
    )
    check_has_regions(config.model.kind)
    schema = declared_schema(config, op="gem memory")
    on_gpu = torch.cuda.is_available()
    given = drawn_batch(drawn, schema, World(), None, {})
    profile = profile_of(
        config,
        schema,
        given.to(torch.device("cuda")) if on_gpu else given,
        packing=packing_of(config.memory.kept),
        as_gpu=not on_gpu,
        # One GPU has copies of the weights between steps; where each forward pass makes them, they
        # count.
        count_weights=config.train.accumulation_parts > 1
        or config.precision.formats() != ("bf16_autocast",),
    )
    asked = budgets_gib or (config.memory.budget_gib,)
    plans = tuple(choose(profile, None if b is None else int(b * 2**30)) for b in asked)
    return MemoryAnswer(config, given.examples, given.event_tokens, profile, plans)


def answer_json(answer: MemoryAnswer) -> dict[str, Any]:
    """The answer as one JSON document.

    Args:
        answer: of the command.

    Returns:
        plain values; bytes and milliseconds by name.
    """
    return {
        "recipe": answer.config.name,
        "examples": answer.examples,
        "events": answer.events,
        "kept": answer.config.memory.kept,
        "plans": [memory_json(answer.profile, plan) for plan in answer.plans],
    }


def answer_text(answer: MemoryAnswer) -> str:
    """The answer for people.

    Args:
        answer: of the command.

    Returns:
        lines of text, ending in a newline.
    """
    head = f"{answer.config.name}: {answer.examples:,} examples, {answer.events:,} events a rank\n"
    return head + "\n" + "\n".join(memory_text(answer.profile, plan) for plan in answer.plans)
