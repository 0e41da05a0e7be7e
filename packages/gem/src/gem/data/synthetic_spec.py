"""Options of the synthetic data set. No torch, no numpy."""

from typing import Literal

from pydantic import Field, model_validator

from gem_opkit.contract import Contract


class SyntheticSpec(Contract):
    """What `gem.data.synthetic` generates. Equal options give equal files."""

    rows: int = Field(default=20_000, ge=1, description="examples")
    users: int = Field(default=1_000, ge=1)
    items: int = Field(default=500, ge=1)
    categories: int = Field(default=16, ge=1, description="item categories; users prefer one")
    seed: int = Field(default=0, ge=0)
    max_backlog_events: int = Field(
        default=512, ge=0, description="longest history that a user has before the first example"
    )
    length_law: Literal["zipf", "uniform"] = Field(
        default="zipf",
        description="law of these lengths: Zipf, or uniform, from 1 to max_backlog_events",
    )
    length_alpha: float = Field(
        default=1.2, gt=1, description="exponent of the Zipf law of history lengths"
    )
    id_alpha: float = Field(default=1.05, gt=1, description="exponent of the Zipf law of item ids")
    features: int = Field(
        default=0,
        ge=0,
        le=100,
        description="further categorical inputs, feature_00 and so on, each with a table of its "
        "own; they say nothing about the labels",
    )
    feature_values: int = Field(
        default=1_000, ge=1, description="values of each, as popular as the items are"
    )
    content_width: int = Field(
        default=0,
        ge=0,
        le=100,
        description="width of a vector that each item carries, numbers content_00 and so on, which "
        "tells its category and its quality with noise; a stream reads them by its fields",
    )
    click_rate: float = Field(default=0.3, gt=0, lt=1, description="about the share of clicks")
    conversion_rate: float = Field(
        default=0.2, gt=0, lt=1, description="about the share of conversions among clicks"
    )
    missing_frac: float = Field(
        default=0.05, ge=0, lt=1, description="share of static features that are null"
    )
    hashed_ids: bool = Field(
        default=False, description="user and item ids are arbitrary 64-bit numbers"
    )
    valid_frac: float = Field(default=0.1, ge=0, lt=1)
    test_frac: float = Field(default=0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _some_training_rows(self) -> "SyntheticSpec":
        if self.valid_frac + self.test_frac >= 1:
            raise ValueError(
                f"valid_frac + test_frac must be below 1; got {self.valid_frac} + {self.test_frac}"
            )
        return self
