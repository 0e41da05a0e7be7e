"""Streaming statistics that a recipe declares; `engine` computes them. Torch-free.

Notation, for an example with candidate i at time t and the events j = 1 .. n of its history:

    P, N      sum of labels and number of labelled training rows strictly earlier than t, per key;
              a label with visible_after_ms counts from so long after its row on
    rate      (P + prior · towards) / (N + prior)
    l_j       past label of event j (1 for a positive id of the feedback field), where it is known
    p_j, p    the base rate of the event's item and of the candidate, as they stand at t
    e_j       l_j - p_j, the residual;   c_j = e_j - Σ e / (n + centre_prior), the centred residual
    w_j       product of the declared weights

Events whose feedback is not known at t count in nothing but `history_count` and `history_gap`.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gem_opkit.contract import Contract

_Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=64)]
# A prior of 0 would leave the rate of a new key, and its logit, undefined.
_Prior = Annotated[float, Field(gt=0)]


class RateStatistic(Contract):
    """Smoothed mean label of a key over earlier training rows."""

    kind: Literal["rate"]
    name: _Name
    keys: tuple[_Name, ...] = Field(
        default=(), description="id inputs; none: one rate for all rows; one may be multi-valued"
    )
    label: _Name
    prior: _Prior = Field(default=10.0, description="how many rows the prior is worth")
    towards: float | _Name = Field(
        default=0.5, description="prior rate: a number in (0, 1), or another rate, named earlier"
    )
    max_keys: int = Field(
        default=2**22, gt=0, description="keys kept apart; with more, they share by hash"
    )
    output: Literal["logit", "offset", "none"] = Field(
        default="logit",
        description="logit(rate); offset: minus logit(towards); none: only others use it. Of a "
        "multi-valued key: the mean over its values",
    )

    @model_validator(mode="after")
    def _proper_prior(self) -> "RateStatistic":
        if isinstance(self.towards, float) and not 0 < self.towards < 1:
            raise ValueError(
                f"statistic {self.name!r}: towards must lie in (0, 1); got {self.towards}"
            )
        return self


class CountStatistic(Contract):
    """log(1 + N) of a key over earlier training rows with a known label."""

    kind: Literal["count"]
    name: _Name
    keys: tuple[_Name, ...] = ()
    label: _Name
    max_keys: int = Field(default=2**22, gt=0, description="as of a rate")


class HistoryCount(Contract):
    """log(1 + number of events in the history)."""

    kind: Literal["history_count"]
    name: _Name
    stream: _Name
    max_events: int = Field(default=200, gt=0)


class HistoryGap(Contract):
    """log(1 + seconds from an event of the history to the example); 0 without events."""

    kind: Literal["history_gap"]
    name: _Name
    stream: _Name
    event: Literal["newest", "oldest"] = "newest"
    max_events: int = Field(default=200, gt=0)


class RankWeight(Contract):
    """exp(-rank / scale), rank 0 for the newest event."""

    kind: Literal["rank"]
    scale: float = Field(gt=0)


class TimeWeight(Contract):
    """1 / (1 + gap / scale)."""

    kind: Literal["time"]
    scale_s: float = Field(gt=0)


class WindowWeight(Contract):
    """1 for events less than so long ago, else 0."""

    kind: Literal["window"]
    window_s: float = Field(gt=0)


class SameWeight(Contract):
    """1 where the event's item and the candidate have the same id in a field, else 0."""

    kind: Literal["same"]
    field: _Name


class OverlapWeight(Contract):
    """(Jaccard index of the two sets of ids of a multi-valued field) ** power."""

    kind: Literal["overlap"]
    field: _Name
    power: float = Field(default=1.0, gt=0)


class NumberWeight(Contract):
    """exp(-|difference of a number field| / scale)."""

    kind: Literal["number_near"]
    field: _Name
    scale: float = Field(gt=0)


class RateWeight(Contract):
    """exp(-((logit p_j - logit p) / scale)² / 2)."""

    kind: Literal["rate_near"]
    scale: float = Field(gt=0)


class CountWeight(Contract):
    """exp(-|log(1 + N_j) - log(1 + N)| / scale), counts of the base rate."""

    kind: Literal["count_near"]
    scale: float = Field(gt=0)


WeightSpec = Annotated[
    RankWeight
    | TimeWeight
    | WindowWeight
    | SameWeight
    | OverlapWeight
    | NumberWeight
    | RateWeight
    | CountWeight,
    Field(discriminator="kind"),
]


class FeedbackSpec(Contract):
    """Where the past label of an event stands."""

    stream: _Name
    field: _Name = Field(description="id field of the stream")
    positive: tuple[int, ...] = Field(min_length=1, description="ids that mean label 1")
    negative: tuple[int, ...] = Field(description="ids that mean label 0; others: not known")
    max_events: int = Field(default=200, gt=0, description="the last so many events count")

    @model_validator(mode="after")
    def _disjoint(self) -> "FeedbackSpec":
        both = set(self.positive) & set(self.negative)
        if both:
            raise ValueError(f"feedback: positive and negative must differ; both hold {both}")
        return self


class HistoryStatistic(Contract):
    """A weighted sum over the history.

    value = rate:      logit((Σ w l + prior · p) / (Σ w + prior))
    value = residual:  Σ w e / (Σ w + prior)
    value = centred:   Σ w c / (Σ w + prior)
    value = weight:    log(1 + Σ w)
    """

    kind: Literal["history"]
    name: _Name
    feedback: FeedbackSpec
    base: _Name = Field(description="rate statistic with one key, the candidate")
    value: Literal["rate", "residual", "centred", "weight"] = "residual"
    weights: tuple[WeightSpec, ...] = ()
    prior: float = Field(default=3.0, gt=0)
    centre_prior: _Prior = 5.0


class PairStatistic(Contract):
    """Votes of the history by how the residuals of two items went together.

    A labelled training row (i, y) adds to each pair of i and an event of its history
    S += (y - p) · e_j and C += 1, both as they stand at the row's time; the order of the pair does
    not matter. Only of a label that is known at once.

    value = votes:  Σ_j S / (C + prior) · c_j
    value = count:  log(1 + mean_j C)
    """

    kind: Literal["pair"]
    name: _Name
    feedback: FeedbackSpec
    base: _Name = Field(description="rate statistic with one key, the candidate")
    value: Literal["votes", "count"] = "votes"
    prior: float = Field(default=80.0, gt=0)
    centre_prior: _Prior = 5.0
    max_pairs: int = Field(
        default=2**22,
        gt=0,
        description="rows of the table of pairs; with more possible pairs they share rows by hash",
    )


class EventStatistic(Contract):
    """A number of every event, added to the continuous fields of a stream.

    value = rate: logit p_j · residual: e_j · centred: c_j · pair: S / (C + prior) · weight: w_j.
    Where the feedback is not known, residual and centred are 0.
    """

    kind: Literal["event"]
    name: _Name
    feedback: FeedbackSpec
    base: _Name
    value: Literal["rate", "residual", "centred", "pair", "weight"]
    weights: tuple[WeightSpec, ...] = ()
    prior: float = Field(default=80.0, gt=0)
    centre_prior: _Prior = 5.0
    max_pairs: int = Field(default=2**22, gt=0)

    @model_validator(mode="after")
    def _weights_where_used(self) -> "EventStatistic":
        if bool(self.weights) != (self.value == "weight"):
            raise ValueError(
                f"statistic {self.name!r}: weights must be given with value = 'weight' and only "
                f"there; got {len(self.weights)} with value = {self.value!r}"
            )
        return self


StatisticSpec = Annotated[
    RateStatistic
    | CountStatistic
    | HistoryCount
    | HistoryGap
    | HistoryStatistic
    | PairStatistic
    | EventStatistic,
    Field(discriminator="kind"),
]
