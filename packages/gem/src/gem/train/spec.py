"""How a model is trained: the recipe's ``[train]`` and ``[memory]``. Imports no torch."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gem.train.straggler_spec import StragglerSpec
from gem_embeddings.contract import OptimizerSpec
from gem_opkit.contract import Contract
from gem_opkit.errors import ConfigError, refusal


class DenseOptimizerSpec(Contract):
    """Adam, with decoupled weight decay where ``weight_decay`` is above 0, for dense weights."""

    lr: float = Field(
        default=1e-3, gt=0, le=1e6, description="learning rate at the peak of the schedule"
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the gradient's mean")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of its mean square")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the mean square")
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="share of a weight, times lr, that a step takes off; not of vectors",
    )
    lr_factors: dict[str, Annotated[float, Field(ge=0, le=1e6)]] = Field(
        default={},
        description="prefix of qualified parameter names -> factor of their learning rate; the "
        "longest prefix that fits counts",
    )


class ScheduleSpec(Contract):
    """The learning rate over the pass, as a factor of the peak. The pass length is known."""

    warmup_steps: int = Field(default=0, ge=0, description="steps of linear rise from 0")
    decay: Literal["constant", "linear", "cosine"] = Field(
        default="linear", description="shape of the fall from the end of the rise to the last step"
    )
    final_frac: float = Field(
        default=0.1, ge=0, le=1, description="factor at the last step; unused by constant"
    )
    tables: bool = Field(
        default=False, description="apply the factor to the table optimizer as well"
    )


class GuardSpec(Contract):
    """What becomes of a step whose loss or gradients are no numbers, or whose loss jumps.

    The batch of such a step is written to ``faulty-batches/`` in the run's folder, whatever is
    chosen. A skipped step moves no weight, no average and no optimizer.
    """

    nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="on a loss or a gradient that is NaN or infinite: end the run, with a "
        "checkpoint of the state before that step, or leave the step out and count it",
    )
    spike_factor: float | None = Field(
        default=None,
        gt=1,
        description="a loss of more than so many times the mean of the newest steps is a spike; "
        "none: nothing is",
    )
    spike: Literal["stop", "skip"] = Field(default="skip", description="on a spike: as nonfinite")
    spike_after_steps: int = Field(
        default=100, gt=0, description="steps before the first one that can be a spike"
    )
    most_skipped_in_a_row: int = Field(
        default=10,
        gt=0,
        description="skipped steps in a row after which the run stops all the same",
    )


class InterimSpec(Contract):
    """Evaluation while training, and whether it ends the training early."""

    every_steps: int | None = Field(
        default=None, gt=0, description="steps between evaluations; none: only at the end"
    )
    split: str = Field(default="valid", description="what is evaluated")
    max_batches: int | None = Field(
        default=None, gt=0, description="batches of the split, from its first one; none: all"
    )
    stop_after: int | None = Field(
        default=None,
        gt=0,
        description="end the training after so many evaluations in a row without a better NE; "
        "none: never",
    )
    task: str | None = Field(
        default=None, description="task whose NE is meant; none: the first of the data set"
    )
    min_gain: float = Field(
        default=0.0, ge=0, description="an NE counts as better if it is lower by more than this"
    )


class WandbSpec(Contract):
    """Curves on Weights & Biases, beside the files of the run. Needs ``gem-trainer[wandb]``."""

    project: str = Field(min_length=1, description="project that the run is put into")
    entity: str | None = Field(default=None, description="user or team; none: the account's own")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: files below the run's folder, for wandb sync"
    )


class StartTablesSpec(Contract):
    """Tables that begin as those of another run, such as a teacher's."""

    run: str = Field(description="folder of the other run")
    tables: tuple[str, ...] | None = Field(
        default=None, description="which; none given: all that both have by the same name"
    )


class TrainSpec(Contract):
    """One training run: batches, optimizers, schedule, checkpoints and logs."""

    batch_examples: int = Field(default=512, gt=0, description="examples of a step, over all ranks")
    accumulation_parts: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="parts that the batch of a rank is run in, one after the other, to save "
        "memory; their gradients are added up (gradient accumulation)",
    )
    passes: int = Field(
        default=1, ge=1, description="times that the training rows are read; 1 is the product's use"
    )
    later_passes: Literal["train_all", "freeze_tables", "reset_tables"] = Field(
        default="train_all",
        description="what becomes of the tables behind the first pass, since rows of ids learn "
        "their labels by heart when they see them again: they go on learning; they stay as they "
        "are; or they begin anew in each pass",
    )
    row_l2: float = Field(
        default=0.0,
        ge=0,
        description="pull of the rows that a step looked up towards 0, once a step however often; "
        "it holds back rare ids most",
    )
    label_delay: Literal["none", "wait"] = Field(
        default="none",
        description="wait: a row is scored at its time and trained on once all of its labels are "
        "known, by the longest visible_after_ms of the data set's labels; none: in the same step",
    )
    dense: DenseOptimizerSpec = Field(
        default=DenseOptimizerSpec(), description="optimizer of everything but the tables"
    )
    tables: OptimizerSpec = Field(
        default=OptimizerSpec(), description="optimizer of the embedding tables"
    )
    schedule: ScheduleSpec = Field(default=ScheduleSpec(), description="learning rate over time")
    clip_norm: float | None = Field(
        default=None, gt=0, description="longest gradient of the dense weights, L2 norm"
    )
    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay a step of the average of dense weights that evaluation uses; "
        "none: evaluate the weights themselves",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: CUDA where there is one"
    )
    threads: int | None = Field(
        default=None, gt=0, le=1024, description="CPU threads of a process; none: torch's choice"
    )
    deterministic: bool = Field(
        default=True, description="only operators that give the same bits every time"
    )
    compile: Literal["off", "aot_eager", "inductor"] = Field(
        default="off",
        description="torch.compile of summaries, experts and heads, one graph each: inductor "
        "generates code, aot_eager traces alone",
    )
    cuda_graphs: bool = Field(
        default=False,
        description="on one GPU, launch each pass of summaries, experts and heads as one CUDA "
        "graph; for a host that is late",
    )
    prefetch_batches: int = Field(
        default=4, ge=0, description="batches that a thread reads ahead; 0: no thread"
    )
    checkpoint_every_steps: int | None = Field(
        default=None, gt=0, description="steps between checkpoints; none: only the last step's"
    )
    keep_checkpoints: int = Field(default=2, gt=0, description="newest checkpoints that are kept")
    checkpoint_async: bool = Field(
        default=True,
        description="write a checkpoint from a copy in memory while training goes on; false: wait",
    )
    checkpoint_failure: Literal["stop", "go_on"] = Field(
        default="stop",
        description="when a checkpoint cannot be written: end the run, or warn and try again at "
        "the next one; the last one of a process has to succeed",
    )
    wall_limit_s: float | None = Field(
        default=None,
        gt=0,
        description="seconds after the start of this process by which it has written a checkpoint "
        "and ended, to be continued with --resume; none: no limit",
    )
    log_every_steps: int = Field(
        default=20, gt=0, description="steps between rows of metrics.jsonl and TensorBoard"
    )
    window_steps: int = Field(
        default=200,
        gt=0,
        description="newest steps that the window metrics cover; a multiple of log_every_steps",
    )
    predictions: bool = Field(
        default=False, description="write predictions.parquet for the valid and test rows"
    )
    start_tables: StartTablesSpec | None = Field(
        default=None, description="tables that begin as those of another run; none: fresh rows"
    )
    guard: GuardSpec = Field(
        default=GuardSpec(), description="loss or gradients that are no numbers, and jumps"
    )
    straggler: StragglerSpec = Field(
        default=StragglerSpec(), description="ranks that the log names for being slow"
    )
    interim: InterimSpec = Field(
        default=InterimSpec(), description="evaluation while training, and early stop"
    )
    wandb: WandbSpec | None = Field(
        default=None, description="curves on Weights & Biases as well; none: not"
    )

    @model_validator(mode="after")
    def _window_is_whole_blocks(self) -> Self:
        if self.window_steps % self.log_every_steps:
            raise ConfigError(
                refusal(
                    "train",
                    "window_steps",
                    must=f"be a multiple of log_every_steps={self.log_every_steps}",
                    got=self.window_steps,
                    fix="change one of the two",
                )
            )
        return self

    @model_validator(mode="after")
    def _later_passes_are_there(self) -> Self:
        if self.later_passes != "train_all" and self.passes == 1:
            raise ConfigError(
                refusal(
                    "train",
                    "later_passes",
                    must="come with passes of at least 2",
                    got=f"{self.later_passes!r} with passes=1",
                    fix="set train.passes as well",
                )
            )
        return self

    @model_validator(mode="after")
    def _labels_are_waited_for_once(self) -> Self:
        if self.label_delay == "wait" and self.passes > 1:
            raise ConfigError(
                refusal(
                    "train",
                    "label_delay",
                    must='be "none" with several passes, in which no label is late',
                    got=f"{self.label_delay!r} with passes={self.passes}",
                    fix="set train.passes=1, or leave it out",
                )
            )
        return self

    @model_validator(mode="after")
    def _early_stop_has_evaluations(self) -> Self:
        if self.interim.stop_after is not None and self.interim.every_steps is None:
            raise ConfigError(
                refusal(
                    "train",
                    "interim.stop_after",
                    must="come with interim.every_steps, the steps between evaluations",
                    got=self.interim.stop_after,
                    fix="set train.interim.every_steps as well",
                )
            )
        return self


class MemorySpec(Contract):
    """What the backward pass may find in memory: the recipe's ``[memory]``."""

    budget_gib: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="GiB a rank for activations, at any moment of a step; what does not fit is "
        "made again in the backward pass, where that takes least time; none: all is kept",
    )
    kept: Literal["as_is", "fp8", "fp4"] = Field(
        default="as_is",
        description="format in which large activations are kept for the backward pass; the "
        "forward pass reads them as they are",
    )
    pack_above_bytes: int = Field(
        default=2**20,
        ge=1,
        description="size from which an activation counts as large; below the default, packing "
        "takes longer than the memory is worth, but shows what it does to a small model",
    )

    @model_validator(mode="after")
    def _what_is_large_is_packed(self) -> Self:
        # A resolved recipe names every key: only another size than the default says something.
        default = type(self).model_fields["pack_above_bytes"].default
        if self.kept == "as_is" and self.pack_above_bytes != default:
            raise ConfigError(
                refusal(
                    "memory",
                    "pack_above_bytes",
                    must="come with memory.kept, the format that activations are packed to",
                    got=f"{self.pack_above_bytes} with kept = {self.kept!r}",
                    fix='set memory.kept to "fp8" or "fp4", or leave it out',
                )
            )
        return self


# Settings that may differ between a checkpoint and the run that continues it: they decide where a
# run finds its data, how it is watched and kept, not what it computes. That the data is the same
# is checked by its fingerprint. The guard is among them because a run that stopped on a faulty
# batch is to go on without it; the plan of ranks because a checkpoint fits any plan, and the way of
# drawing initial rows because it has been used by then. A table stands for all keys in it.
RESUMABLE_KEYS = frozenset(
    {
        "description",
        "data.folder",
        "data.source",
        "data.memory_mib",
        "data.workers",
        "data.index_folder",
        "train.prefetch_batches",
        "train.checkpoint_every_steps",
        "train.keep_checkpoints",
        "train.checkpoint_async",
        "train.checkpoint_failure",
        "train.wall_limit_s",
        "train.predictions",
        "train.guard.nonfinite",
        "train.guard.spike",
        "train.guard.spike_factor",
        "train.guard.spike_after_steps",
        "train.guard.most_skipped_in_a_row",
        "train.wandb",
        "train.wandb.project",
        "train.wandb.entity",
        "train.wandb.mode",
        "train.straggler",
        "memory.budget_gib",
        "model.embeddings.initial_rows",
        "parallel",
    }
)


def schedule_factor(spec: ScheduleSpec, step: int, total_steps: int) -> float:
    """Learning-rate factor of a step: a pure function, so a resumed run cannot lose it.

    Args:
        spec: the schedule.
        step: 0-based step, below ``total_steps``.
        total_steps: steps of the whole run.

    Returns:
        A factor in [0, 1]: above 0 during the rise, ``final_frac`` at the last step.
    """
    if step < spec.warmup_steps:
        return (step + 1) / (spec.warmup_steps + 1)
    if spec.decay == "constant":
        return 1.0
    steps = total_steps - 1 - spec.warmup_steps
    gone = min((step - spec.warmup_steps) / steps, 1.0) if steps > 0 else 1.0
    fall = gone if spec.decay == "linear" else 0.5 * (1.0 - math.cos(math.pi * gone))
    return 1.0 + (spec.final_frac - 1.0) * fall
