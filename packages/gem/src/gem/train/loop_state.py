"""What a run decides by, beside its tensors: faults so far, evaluations so far. In checkpoints.

It is the same on every rank, as all of it comes from sums over ranks. A checkpoint holds it as
JSON, whose numbers come back to the last bit. Loads no torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class LoopState:
    """Counters and marks of a run.

    Attributes:
        loss_mean: mean loss of the newest steps that were not skipped; for spikes.
        loss_steps: steps that it is of.
        skipped_in_a_row: steps that were skipped since the last one that was not.
        skipped_steps: steps that were skipped.
        skipped_examples: examples of theirs, over all ranks.
        evaluated_step: last step after which the run was evaluated; -1 for none.
        best_ne: lowest NE of these evaluations; None before the first that has one.
        best_step: the step that it is of.
        evaluations_since_best: evaluations after it.
        stopped_early: whether the evaluations have ended the training.
        scored_batches: batches of the pass that were scored, in a run that waits for labels; -1
            where it does not wait, or an older version wrote the checkpoint.
    """

    loss_mean: float = 0.0
    loss_steps: int = 0
    skipped_in_a_row: int = 0
    skipped_steps: int = 0
    skipped_examples: int = 0
    evaluated_step: int = -1
    best_ne: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    stopped_early: bool = False
    scored_batches: int = -1

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return asdict(self)

    def load(self, content: Mapping[str, Any]) -> None:
        """Continue from what ``to_json`` returned.

        Args:
            content: may lack what an older version did not write.
        """
        for field in fields(self):
            setattr(self, field.name, content.get(field.name, field.default))
