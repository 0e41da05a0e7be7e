"""When a run's state becomes a checkpoint, and what happens where that fails."""

import contextlib
from typing import cast

import torch

from gem.model.sharded_tables import ShardedTables
from gem.train.checkpoint_tensors import table_tensors
from gem.train.checkpoint_writer import (
    CheckpointWriter,
    not_written,
    raise_on_all,
    remove_partial,
    take_snapshot,
)
from gem.train.diagnostics import Diagnostics
from gem.train.evaluate import merge_ranks
from gem.train.guard import all_finite
from gem.train.local_tensors import local_parts
from gem.train.log_rows import flush
from gem.train.rank_group import RankGroup
from gem.train.run import Run, agree, reduced_counters
from gem.train.run_folder import CHECKPOINTS
from gem.train.table_counts import counter_names
from gem_embeddings.pieces import local_pieces
from gem_embeddings.tables import EmbeddingTables
from gem_opkit.errors import DataError, refusal
from gem_parallel.collectives import all_reduce_sum

# What is taken for the speed of the disk, so that a time limit leaves time for the first one.
_SLOW_DISK_BYTES_PER_S = 2e8


class Saver:
    """Writes the checkpoints of a run. To be used in a ``with`` block, on every rank.

    Args:
        run: whose state it is.
        diagnostics: written beside every checkpoint.
    """

    def __init__(self, run: Run, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        # What was loaded lies there.
        self._saved: tuple[int, dict[str, object]] | None = _mark(run)
        self._writer = CheckpointWriter(
            run.folder / CHECKPOINTS,
            keep=run.spec.keep_checkpoints,
            background=run.spec.checkpoint_async,
            ranks=RankGroup.of_its_own(run.world) if run.state.sharded else None,
        )
        # A run that was killed at its last checkpoint writes no other one, which would do it.
        if run.world.is_first:
            with contextlib.suppress(OSError):  # the next write tells
                remove_partial(run.folder / CHECKPOINTS)
        self._tell_time(run)

    def __enter__(self) -> "Saver":
        self._writer.__enter__()
        return self

    def __exit__(self, *ending: object) -> None:
        self._writer.__exit__(*ending)  # type: ignore[arg-type] - the three of a with block

    def save(self, run: Run, *, wait: bool) -> None:
        """Save the state, unless that was the last thing done. Every rank has to call this.

        Args:
            run: between two steps.
            wait: come back when it is on disk. Otherwise training may go on meanwhile.

        Raises:
            DataError: this checkpoint or the one before it cannot be written, or weights are no
                numbers.
        """
        run.clock.mark("checkpoint")
        if _mark(run) != self._saved:
            flush(run)
            if not state_is_finite(run):
                raise _worthless(run)
            self._writer.wait()
            fault = self._writer.take_fault()
            if agree(run.world, int(fault is not None))[0]:
                self.react(run, fault)
            self._write(run, copy=run.spec.checkpoint_async and not wait)
            self._saved = _mark(run)
            run.clock.mark("other")
            self._diagnostics.write(run)
            run.clock.mark("checkpoint")
        if wait:
            self._writer.wait()
            raise_on_all(self._writer.take_fault(), run.world)
        self._tell_time(run)
        run.clock.mark("other")

    def _tell_time(self, run: Run) -> None:
        """Say how long a checkpoint takes, to be left of a time limit."""
        if run.stop is None:
            return
        guess_s = _bytes_to_come(run) / _SLOW_DISK_BYTES_PER_S
        run.stop.write_s = 0.0 if run.trained else self._writer.longest_s or guess_s

    def _write(self, run: Run, *, copy: bool) -> None:
        state = run.state
        counters, histories, outside = state.counters, state.histories, out_of_range(run)
        outside_here = outside.clone()
        state.counters = reduced_counters(counters, run.world, counter_names(state.model))
        state.histories = histories.merged(run.world)
        all_reduce_sum(outside, run.world)
        keeps_best = run.spec.interim.stop_after is not None
        try:
            snapshot = take_snapshot(
                state,
                run.config,
                run.world,
                current=merge_ranks(state.metrics.current, run.world),
                dataset=run.dataset,
                copy=copy,
            )
            self._writer.write(snapshot, best=state.loop.best_step if keeps_best else None)
            if not copy:  # what is put back below is being written
                self._writer.wait()
        finally:
            state.counters, state.histories = counters, histories
            outside.copy_(outside_here)

    def take_fault(self) -> BaseException | None:
        """Why a write of this rank has failed since this was last asked. Waits for nothing."""
        return self._writer.take_fault()

    def react(self, run: Run, fault: BaseException | None) -> None:
        """Stop the run after a failed write, or warn, as the recipe says. On every rank at once.

        Args:
            run: whose checkpoint it was.
            fault: of this rank; None where another one has it.

        Raises:
            DataError: the recipe says stop.
        """
        if run.spec.checkpoint_failure == "stop" or not isinstance(fault, Exception | None):
            raise fault if fault is not None else not_written()
        # Where all ranks write, one may not have come to the end of its part.
        self._writer.wait()
        self._writer.take_fault()
        self._saved = None
        run.display.stage(f"warning: no checkpoint this time, training goes on: {fault}")


def state_is_finite(run: Run) -> bool:
    """Whether a run could go on from its weights, averages and optimizers. Waits for the device.

    Args:
        run: between two steps.

    Returns:
        The same on every rank.
    """
    own = bool(all_finite([value for values in _numbers(run).values() for value in values]))
    return not agree(run.world, int(not own))[0] if run.state.sharded else own


def _numbers(run: Run) -> dict[str, list[torch.Tensor]]:
    """What must be finite, by kind: of this rank, where it is sharded."""
    entries = [e for o in run.step.optimizers.values() for e in o.state.values()]
    rows: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for name, tensor in table_tensors(run.step.model).items():
        rows[name.startswith("model/")] += [piece.values for piece in local_pieces(tensor)]
    # Optimizers keep their count of steps in host memory.
    device = run.world.device.type
    return {
        "weights": [
            *local_parts([*run.step.model.parameters(), *run.step.ema.values()]),
            *rows[True],
        ],
        "optimizers": [
            *local_parts(
                value
                for entry in entries
                for value in entry.values()
                if isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.device.type == device
            ),
            *rows[False],
        ],
    }


def _worthless(run: Run) -> DataError:
    wrong = int(not all_finite(_numbers(run)["weights"]))
    what = "weights" if agree(run.world, wrong)[0] else "optimizers"
    return DataError(
        refusal(
            "gem train",
            what,
            must="be finite, to be saved",
            got=f"NaN or infinity after step {run.state.step}",
            fix="lower train.dense.lr and train.tables.lr; the checkpoint before it is whole",
        )
    )


def _bytes_to_come(run: Run) -> int:
    """About the size of a checkpoint."""
    found = _numbers(run)
    # Before the first step optimizers hold nothing. Adam will hold two numbers for a dense weight;
    # of tables the usual one holds a number a row.
    begun = any(o.state for o in run.step.optimizers.values())
    dense = local_parts(run.step.dense.values())
    tensors = [*found["weights"], *found["optimizers"], *([] if begun else dense * 2)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _mark(run: Run) -> tuple[int, dict[str, object]]:
    return run.state.step, run.state.loop.to_json()


def out_of_range(run: Run) -> torch.Tensor:
    """Counts by table of ids outside it, of this rank; a buffer of the model.

    Args:
        run: has the model.
    """
    tables = run.state.model.get_submodule("tables")
    return cast(EmbeddingTables | ShardedTables, tables).out_of_range
