"""Several passes over a small log: what becomes of the tables behind the first one.

A model that has ids learns the labels of the training rows by heart as soon as it sees them again,
through rows that few examples share: it gets worse at the first step of the second pass. Rows that
are drawn anew, or that no longer move, cannot remember; the dense weights go on learning.

Source: Zhang et al. 2022 (arXiv:2209.06053) for overfitting behind one epoch, Liu et al. 2023
(arXiv:2305.19531) for tables that begin anew in each.
"""

from typing import TYPE_CHECKING

import torch

from gem.train.spec import TrainSpec
from gem_embeddings.contract import TableSpec
from gem_embeddings.initial import fill_initial
from gem_embeddings.optimizer import gradient_rows
from gem_embeddings.tables import EmbeddingTables
from gem_opkit.errors import UnsupportedError, refusal

if TYPE_CHECKING:
    from gem.train.run import Run


def pass_of(spec: TrainSpec, step: int, total_steps: int) -> int:
    """Say which pass a step belongs to.

    Args:
        spec: the recipe's ``[train]``.
        step: 0-based step of the run.
        total_steps: of the whole run, a multiple of the passes.

    Returns:
        0 for the first pass.
    """
    return step * spec.passes // total_steps if total_steps else 0


def tables_rest(spec: TrainSpec, step: int, total_steps: int) -> bool:
    """Say whether tables stay as they are in a step.

    Args:
        spec: the recipe's ``[train]``.
        step: 0-based step of the run.
        total_steps: of the whole run.

    Returns:
        True behind the first pass, where the recipe freezes them.
    """
    return spec.later_passes == "freeze_tables" and pass_of(spec, step, total_steps) > 0


def refuse_engine(spec: TrainSpec, *, has_engine: bool) -> None:
    """Refuse what is built for tables that every rank holds.

    Args:
        spec: the recipe's ``[train]``.
        has_engine: whether an engine holds the tables.

    Raises:
        UnsupportedError: names the key.
    """
    wanted = {
        "later_passes": (spec.later_passes, spec.later_passes == "reset_tables"),
        "row_l2": (spec.row_l2, spec.row_l2 > 0),
    }
    for key, (got, is_set) in wanted.items():
        if is_set and has_engine:
            raise UnsupportedError(
                refusal(
                    "gem train",
                    f"train.{key}",
                    must="be left out where an engine holds the tables",
                    got=repr(got),
                    fix='set parallel.table_engine="local" and model.embeddings.initial_rows='
                    '"in_order", or leave it out',
                )
            )


def begin_pass(run: "Run") -> None:
    """Draw tables anew where a later pass begins and the recipe wants it.

    Called before the first batch of a pass is read, and where a run is continued: a checkpoint of
    the last step of a pass holds the tables as they were, so that both draw the same rows.

    Args:
        run: at any step.
    """
    spec, at = run.spec, run.state.step
    number = pass_of(spec, at, run.total_steps)
    begins = number > 0 and pass_of(spec, at - 1, run.total_steps) < number
    if spec.later_passes != "reset_tables" or not begins:
        return
    tables, optimizer = run.step.lookups, run.step.optimizers.get("tables")
    if not isinstance(tables, EmbeddingTables) or optimizer is None:  # the model has no tables
        return
    seed = (run.config.seed + number * 0x9E3779B97F4A7C15) % 2**63
    _draw_anew(tables.specs, tables.table_parameters(), seed)
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    run.display.stage(f"pass {number + 1} of {spec.passes}: all tables begin anew")


def _draw_anew(specs: tuple[TableSpec, ...], weights: list[torch.nn.Parameter], seed: int) -> None:
    for spec, weight_RE in zip(specs, weights, strict=True):
        fill_initial(weight_RE.data, spec, seed=seed)


@torch.no_grad()
def pull_rows(parameters: list[torch.nn.Parameter], strength: float) -> None:
    """Add ``strength`` times each row that a step looked up to that row's gradient.

    Once a step, however often the row was looked up: a row that many examples share is pulled
    little beside what they say, a rare one much; and AdaGrad's steps, which shrink with every
    gradient, keep it so.

    Args:
        parameters: weights of tables, with the gradients of a step.
        strength: of the pull; 0 changes nothing.

    Source: the regularisation of DIN (arXiv:1706.06978), which also counts a row once a batch.
    """
    if strength == 0.0:
        return
    for weight_RE in parameters:
        if weight_RE.grad is None:
            continue
        rows_I, grad_IE = gradient_rows(weight_RE.grad)
        pulled_IE = grad_IE + strength * weight_RE.index_select(0, rows_I)
        weight_RE.grad = torch.sparse_coo_tensor(
            rows_I.unsqueeze(0),
            pulled_IE,
            weight_RE.shape,
            is_coalesced=True,
            check_invariants=False,
        )
