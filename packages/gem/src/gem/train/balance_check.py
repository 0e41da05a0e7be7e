"""Refuse a balance that could not change anything; without torch, so that a plan can ask."""

from gem.config import RunConfig
from gem.train.parallel_spec import ParallelSpec
from gem_opkit.errors import ConfigError, refusal


def check_balance(config: RunConfig, plan: ParallelSpec, ranks: int) -> None:
    """Refuse a balance that could not change anything, by the names of the recipe's keys.

    Args:
        config: the run.
        plan: on the ranks that there are.
        ranks: that there are.

    Raises:
        ConfigError: there are no micro-batches, or no base batches, to deal.
    """
    if plan.balance == "off":
        return
    train = config.train
    if plan.balance == "local" and train.accumulation_parts == 1:
        raise ConfigError(
            refusal(
                "recipe",
                "parallel.balance",
                must='be "within_group", "group" or "global" where a rank runs its rows at once '
                "(train.accumulation_parts=1)",
                got='"local", which deals over the micro-batches of a rank',
                fix="take one of them, or run the batch in parts",
            )
        )
    holders = train.accumulation_parts * (1 if plan.balance == "local" else ranks)
    if holders == 1:
        return  # the same recipe on one rank
    rows = train.batch_examples // ranks if plan.balance == "local" else train.batch_examples
    most = (rows - 1) // holders
    if plan.base_batch > most:
        sharing = f"{ranks} ranks" if plan.balance != "local" else "a rank"
        raise ConfigError(
            refusal(
                "recipe",
                "parallel.base_batch",
                must=f"be below {max(most, 0) + 1}, or there is one base batch for each of the "
                f"{holders} micro-batches of {sharing} and nothing to deal "
                f"(train.batch_examples={train.batch_examples})",
                got=plan.base_batch,
                fix="lower it, or raise train.batch_examples",
            )
        )
