"""How a model is trained: the recipe's ``[train]`` section. Imports no torch."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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


class TrainSpec(Contract):
    """One training run: batches, optimizers, schedule, checkpoints and logs."""

    batch_examples: int = Field(default=512, gt=0, description="examples of a step, over all ranks")
    passes: int = Field(
        default=1, ge=1, description="times that the training rows are read; 1 is the product's use"
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
    prefetch_batches: int = Field(
        default=4, ge=0, description="batches that a thread reads ahead; 0: no thread"
    )
    checkpoint_every_steps: int | None = Field(
        default=None, gt=0, description="steps between checkpoints; none: only the last step's"
    )
    keep_checkpoints: int = Field(default=2, gt=0, description="newest checkpoints that are kept")
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


# Settings that may differ between a checkpoint and the run that continues it: they decide where a
# run finds its data, how it is watched and kept, not what it computes. That the data is the same
# is checked by its fingerprint.
RESUMABLE_KEYS = frozenset(
    {
        "description",
        "data.folder",
        "data.source",
        "train.prefetch_batches",
        "train.checkpoint_every_steps",
        "train.keep_checkpoints",
        "train.predictions",
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
