"""Open what a run has written, to evaluate it or to predict with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gem.config import RunConfig
from gem.train.checkpoint import check_continues, latest_complete, load_checkpoint, read_manifest
from gem.train.progress import Display
from gem.train.run import Run, build_run, torch_settings
from gem.train.run_folder import CHECKPOINTS, CONFIG_FILE, read_run_config
from gem.train.run_plan import plan_of
from gem_opkit.errors import ConfigError, DataError, refusal
from gem_parallel.launch import World, process_group


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run as one of its checkpoints left it.

    Attributes:
        run: with the weights of the checkpoint.
        checkpoint: its folder.
    """

    run: Run
    checkpoint: Path

    @property
    def finished(self) -> bool:
        """Whether the run had taken its last step, or its evaluations had ended it."""
        state = self.run.state
        return state.step >= self.run.total_steps or state.loop.stopped_early


def _fitting(config: RunConfig, world: World) -> RunConfig:
    """The run under its own plan, or on another number of ranks with copies of everything."""
    try:
        plan_of(config, world)
    except ConfigError:
        return config.model_copy(update={"parallel": None})
    return config


@contextmanager
def saved_run(
    path: Path, *, command: str, display: Display | None, data_root: Path
) -> Iterator[SavedRun]:
    """Build the model of a run and load its newest complete checkpoint, or a given one.

    Args:
        path: the run's folder, or one of its checkpoints.
        command: who asks, for messages.
        display: shows the progress on the first rank, and which checkpoint it is; none: silent.
        data_root: as in `gem.train.loop.train`.

    Yields:
        The run; ranks are connected and torch is set up as in training.

    Raises:
        ConfigError: the folder holds no run.
        DataError: no complete checkpoint, or the data set is missing, malformed or another one.
    """
    # A checkpoint of a run, rather than the run.
    one = path if not (path / CONFIG_FILE).is_file() and path.parent.name == CHECKPOINTS else None
    folder = path if one is None else path.parent.parent
    config = read_run_config(folder)
    with process_group(config.train.device) as world, torch_settings(config.train):
        display = display if display is not None and world.is_first else Display(None)
        checkpoint = latest_complete(folder / CHECKPOINTS) if one is None else one
        if checkpoint is None:
            raise DataError(
                refusal(
                    command,
                    "RUN",
                    must="have a complete checkpoint",
                    got=str(folder),
                    fix="train it first, or continue it with --resume",
                )
            )
        manifest = read_manifest(checkpoint)
        run = build_run(_fitting(config, world), folder, world, display, data_root)
        check_continues(manifest, config, run.dataset)
        load_checkpoint(checkpoint, run.state, world)
        saved = SavedRun(run, checkpoint)
        where = f"step {run.state.step} of {run.total_steps}"
        state = "the finished run" if saved.finished else "the run is not finished"
        display.stage(f"checkpoint {checkpoint}: {where}, {state}")
        yield saved
