"""What a model gives to other models, or learns from them: sections of `ModelSpec`. Torch-free."""

from pydantic import Field

from gem.model.stream_spec import Width
from gem_opkit.contract import Contract


class UserModelSpec(Contract):
    """An upstream model of users: its layers never see a candidate.

    Layers read the inputs of the user and the events alone, and the age of an event is counted
    from the user's latest one, so that what they make is a function of what the user did. One
    vector of it, the user embedding, is all that the heads read, beside the candidate.

    Source: the upstream stage of LLaTTE (arXiv:2601.20083).
    """

    width: Width = Field(default=32, description="width of the user embedding")
    candidate_hidden: Width = Field(
        default=64, description="hidden width of the MLP over the candidate, in the heads alone"
    )
    next_event_weight: float = Field(
        default=0.1,
        ge=0,
        description="weight of the loss of the next item, a softmax over the items of the batch",
    )
    next_event_task: str | None = Field(
        default=None,
        description="task whose positive rows are next items; none: all rows are",
    )
    time_gap_weight: float = Field(
        default=0.1,
        ge=0,
        description="weight of the loss of the time between the latest event and the example",
    )
    time_gap_knots: int = Field(
        default=16, ge=2, description="knots of that time, on a log scale from a minute to a year"
    )


class DistillationSpec(Contract):
    """Learning from a teacher's logged predictions, on a head that serves nothing.

    The auxiliary head reads what the serving head reads, and has its own weights: the teacher
    shapes the layers below and never the logits that are served. An adapter corrects the teacher's
    logits, which are as old as the teacher, from fresh labels; the head learns what the adapter
    says. No gradient of the adapter reaches the layers.

    Source: auxiliary head and student adapter of ExFM (arXiv:2502.17494).
    """

    weight: float = Field(
        default=1.0, gt=0, le=1e6, description="weight of the loss of the auxiliary head"
    )
    hidden_widths: tuple[Width, ...] = Field(
        default=(32,), description="hidden widths of the auxiliary head"
    )
    adapter: bool = Field(default=True, description="correct the teacher's logits")
    adapter_hidden: Width = Field(default=32, description="hidden width of the adapter")
    adapter_weight: float = Field(
        default=1.0, gt=0, description="weight of its loss; under Adam it hardly matters"
    )
