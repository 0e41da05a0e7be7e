"""From steps to numbers: metrics of what was scored, and the rows of the log.

Steps leave device tensors behind that nothing has waited for. `flush` brings them into the metrics
and counters, `log_row` writes what they come to.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gem.data.batch import ExampleBatch
from gem.model.flops import batch_flops
from gem.train.evaluate import merge_ranks
from gem.train.guard import Fault, nonfinite_gradients, nonfinite_loss, write_batch
from gem.train.progress import StepBar
from gem.train.rank_times import RankRows
from gem.train.run import Run, reduced_counters
from gem.train.run_log import RunLog
from gem.train.table_counts import counter_names, counts_by_table, taken_counts
from gem_opkit.ceilings import device_name, device_peak, share_of_peak
from gem_opkit.errors import DataError, MeasurementError, refusal
from gem_parallel.collectives import all_reduce_sum

_log = logging.getLogger(__name__)


class LogRows:
    """Writes the rows of a run's log.

    Args:
        run: at the step at which this process begins.
        log: takes the rows.
    """

    def __init__(self, run: Run, log: RunLog) -> None:
        self.log = log
        self._peak = device_peak(device_name(run.world.device)).flops_per_s
        self._flops = reduced_counters(run.state.counters, run.world)["flops"]
        self._seconds = self._data_s = self._since_s = 0.0
        self._ranks = RankRows(run.step.model, run.world, run.spec.straggler)

    def write(self, run: Run, bar: StepBar) -> None:
        """Write a row for the steps since the last one. Every rank has to call this.

        Args:
            run: after a step.
            bar: shows some of it.
        """
        norm = run.pending[-1][2].grad_norm if run.pending else None
        flush(run)
        state, metrics = run.state, run.state.metrics
        counters = reduced_counters(state.counters, run.world, counter_names(state.model))
        metrics.close(merge_ranks(metrics.current, run.world))
        steps = counters["loss_steps"]
        window = metrics.window().report(gauc=False)
        seconds = sum(run.clock.seconds.values())
        speed = run.examples_here / max(seconds, 1e-9)
        times = run.reader.times_ms("train")
        seen = ((state.step - 1) % run.reader.steps("train") + 1) * run.spec.batch_examples
        row = {
            "step": state.step,
            "examples": state.examples,
            "time_ms": int(times[min(seen, len(times)) - 1]),
            "loss": counters["loss"] / steps if steps else None,
            "grad_norm": _number(norm),
            "lr": run.step.optimizers["dense"].param_groups[0]["lr"],
            "skipped_steps": state.loop.skipped_steps,
            "window": window,
            "lifetime": metrics.lifetime.report(gauc=False),
            "examples_per_s": speed,
            **self._efficiency(run, counters["flops"], seconds),
            "tables": counts_by_table(state.model, counters),
            "time_frac": run.clock.fractions(),
        }
        row |= self._compared(run, seconds)
        # What a checkpoint held of them is with the first rank alone.
        state.counters |= {"loss": 0.0, "loss_steps": 0.0}
        self.log.write(row)
        bar.update(
            state.step,
            loss=row["loss"],
            NE=next(iter(window.values()))["ne"],
            examples_per_s=speed,
        )

    def _compared(self, run: Run, seconds: float) -> dict[str, Any]:
        """How even the work of ranks was since the last row, and which of them are slow."""
        data_s = run.clock.seconds["data"]
        data_ms, step_ms = 1e3 * (data_s - self._data_s), 1e3 * (seconds - self._since_s)
        self._data_s, self._since_s = data_s, seconds
        found = self._ranks.row(run.works, data_ms, step_ms)
        for line in self._ranks.news(found.get("stragglers", ())):
            run.display.stage(line)
        return found

    def _efficiency(self, run: Run, flops: float, seconds: float) -> dict[str, float | None]:
        """Model FLOPs of the steps since the last row over their time, evaluations left out."""
        seconds -= run.clock.seconds["evaluation"]
        done, elapsed = flops - self._flops, max(seconds - self._seconds, 1e-9)
        self._flops, self._seconds = flops, seconds
        peak = None if self._peak is None else run.world.size * self._peak
        try:
            mfu = share_of_peak(done, 1e3 * elapsed, peak)
        except MeasurementError as fault:  # summary.json refuses it, in the end
            _log.warning("%s", fault)
            mfu = None
        return {"model_tflops_per_s": done / elapsed / 1e12, "e2e_mfu": mfu}


def _number(value: torch.Tensor | None) -> float | None:
    """A scalar as JSON has it: null where it is not known or not finite."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def row_is_due(run: Run) -> bool:
    """Whether the log has a row of this step, whatever evaluations say.

    Args:
        run: after a step.
    """
    step = run.state.step
    return step % run.spec.log_every_steps == 0 or step == run.total_steps


def row_stays(run: Run, row: Mapping[str, Any]) -> bool:
    """Whether a row that is in the log already is of what a continued run has done.

    A checkpoint may be older than rows of its own step: those of an evaluation, and of the steps
    that it ended, which the run was stopped or killed before it could save.

    Args:
        run: as its checkpoint left it.
        row: of the step of that checkpoint.
    """
    loop = run.state.loop
    if row.get("interim"):
        return loop.evaluated_step == run.state.step
    return row_is_due(run) or loop.stopped_early


def flush(run: Run) -> None:
    """Bring what the steps left behind into the metrics. Waits for the device; on every rank.

    Args:
        run: after some step.

    Raises:
        DataError: a step that nobody judged before the weights moved was not finite.
    """
    state = run.state
    steps_a_pass = run.reader.steps("train")
    examples = tokens = skipped = 0
    fault: DataError | None = None
    # One copy from the device for all steps.
    losses = [scored.loss for _, _, scored in run.pending]
    finite = [scored.finite for _, _, scored in run.pending]
    losses, finite = (torch.stack(x).tolist() if x else [] for x in (losses, finite))
    for (step, batch, scored), loss, is_finite in zip(run.pending, losses, finite, strict=True):
        examples += batch.examples
        tokens += batch.event_tokens
        skipped += batch.examples if scored.fault is not None else 0
        if scored.fault is None and not is_finite:
            fault = fault or _too_late(run, step, batch, loss)
            continue
        flops = batch_flops(run.config.model, run.reader.schema, batch).total
        run.works.add(batch, flops)
        taken = scored.fault is None
        # One rank counts the steps: their sum has to mean the same on any number of ranks.
        counted = int(taken and run.world.is_first)
        _add(state.counters, loss=loss if taken else 0.0, loss_steps=counted, flops=flops)
        # Later passes have seen the labels; a run that waits for labels scores rows at their time.
        if step <= steps_a_pass and run.wait is None:
            add_scores(run, batch, scored.p_BA.cpu().numpy(), faulty=scored.fault is not None)
    for name, amount in taken_counts(state.model):
        _add(state.counters, **{name: amount})
    run.pending.clear()
    run.clock.settle()
    sums = [examples, tokens, skipped, int(fault is not None)]
    counts = torch.tensor(sums, dtype=torch.int64, device=run.world.device)
    examples, tokens, skipped, wrong = all_reduce_sum(counts, run.world).tolist()
    if wrong:
        raise fault or stopped_by(nonfinite_loss(math.nan, stops=True), "on another rank")
    state.examples += examples
    state.loop.skipped_examples += skipped
    run.examples_here += examples
    run.tokens_here += tokens


def add_scores(run: Run, batch: ExampleBatch, p_BA: np.ndarray, *, faulty: bool = False) -> None:
    """Add predictions to the progressive metrics.

    Args:
        run: whose.
        batch: this rank's slice.
        p_BA: their probabilities, float32.
        faulty: whether some may be no numbers; these are left out.
    """
    state = run.state
    state.histories.add(batch)
    mask_BA = batch.label_mask_BA.numpy()
    if faulty:
        usable_BA = np.isfinite(p_BA)
        mask_BA, p_BA = mask_BA & usable_BA, np.where(usable_BA, p_BA, np.float32(0.5))
    state.metrics.current.update(
        p_BA,
        batch.labels_BA.numpy(),
        mask_BA,
        batch.domains_B.numpy(),
        batch.user_B.numpy(),
    )


def _too_late(run: Run, step: int, batch: ExampleBatch, loss: float) -> DataError:
    told = nonfinite_gradients if math.isfinite(loss) else nonfinite_loss
    fault = told(loss, stops=True)
    where = keep_batch(run, step, batch, fault)
    return stopped_by(fault, f"in step {step}; {where}")


def keep_batch(run: Run, step: int, batch: ExampleBatch, fault: Fault) -> str:
    """Write a faulty batch into the run's folder.

    Args:
        run: whose batch it is.
        step: 1-based step that it was for.
        batch: this rank's slice.
        fault: what was wrong.

    Returns:
        Words that name the file and the rows.
    """
    rows = batch.row_B
    which = "no rows"
    if len(rows):
        low, high = int(rows.min()), int(rows.max())
        among = "" if high - low + 1 == len(rows) else f"{len(rows)} of "
        which = f"{among}rows {low} to {high} of the log"
    try:
        path = write_batch(run.folder, batch, step=step, rank=run.world.rank, fault=fault)
    except (OSError, RuntimeError) as refusal_of_disk:  # no reason to lose the run
        return f"its batch ({which}) cannot be written: {refusal_of_disk}"
    return f"its batch ({which}) is in {path}" if path is not None else f"its batch has {which}"


def stopped_by(fault: Fault, where: str) -> DataError:
    """The line of a run that a faulty step ends.

    Args:
        fault: what was wrong.
        where: step, file and rows.
    """
    return DataError(
        refusal(
            "gem train",
            fault.name,
            must=fault.must,
            got=f"{fault.got} {where}",
            fix="lower train.dense.lr or set train.clip_norm; check the continuous inputs; or go "
            f"on without such steps: --resume --set {fault.way_on}",
        )
    )


def _add(counters: dict[str, float], **amounts: float) -> None:
    for name, amount in amounts.items():
        counters[name] = counters.get(name, 0.0) + amount
