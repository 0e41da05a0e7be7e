"""A ladder of models of growing cost: what `gem scaling` reads. Torch-free."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gem_opkit.contract import Contract

Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(min_length=1)]


class PlantedSpec(Contract):
    """The world that examples are drawn from (`gem.scaling.planted`)."""

    items: int = Field(default=20_000, ge=1)
    id_alpha: float = Field(default=1.05, gt=1, description="exponent of the Zipf law of item ids")
    latents: int = Field(
        default=16, ge=1, le=100, description="directions of taste; the k-th has variance 1/(k+1)"
    )
    signal: float = Field(default=1.0, ge=0, description="weight of tastes in the logit")
    content_noise: float = Field(
        default=0.5, ge=0, description="standard deviation of a content vector around the traits"
    )
    max_events: int = Field(
        default=1_000, ge=1, description="longest history; lengths are uniform from 1 up"
    )
    click_rate: float = Field(default=0.3, gt=0, lt=1, description="about the share of clicks")
    seed: int = Field(default=0, ge=0, lt=2**16)


class RungSpec(Contract):
    """One model of a ladder."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.+-]+$", description="unique in its ladder")
    set: tuple[str, ...] = Field(
        default=(), description="keys of the recipe that are replaced, as texts a.b=value"
    )
    content: int = Field(
        default=0,
        ge=0,
        le=100,
        description="numbers of the content vector that candidate and events carry, from the "
        "first; planted alone",
    )


class LadderSpec(Contract):
    """Models from cheap to dear, which differ in one direction or in several together."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.+-]+$")
    rungs: tuple[RungSpec, ...] = Field(min_length=1)
    seeds: Seeds | None = Field(
        default=None, description="of weights, for this ladder alone; none: those of all ladders"
    )

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [rung.name for rung in self.rungs]
        if len({*names}) < len(names):
            raise ValueError(f"rungs must have different names; got {', '.join(names)}")
        _refuse_twins(self.seeds or ())
        return self


class ScalingSpec(Contract):
    """What is trained, on what, and which ladder a law is fitted to."""

    recipe: str = Field(
        description="what all rungs begin from: a shipped name, or a path beside this file"
    )
    set: tuple[str, ...] = Field(
        default=(), description="keys of it that are replaced for all rungs, as texts a.b=value"
    )
    source: Literal["planted", "data"] = Field(
        default="data",
        description="planted: examples of a world with a known law are drawn where they are "
        "trained on; data: the recipe's data set, in one pass",
    )
    planted: PlantedSpec = PlantedSpec()
    examples: int = Field(
        default=5_242_880, ge=1, description="examples of training of a rung; planted alone"
    )
    held_out: int = Field(
        default=524_288, ge=1, description="examples that NE is measured on; planted alone"
    )
    seeds: Seeds = Field(default=(1,), description="of weights")
    ladders: tuple[LadderSpec, ...] = Field(min_length=1)
    law: str | None = Field(
        default=None,
        description="ladder that NE(C) = NE_0 - eta log(C / C_0) is fitted to, and whose last rung "
        "is predicted before it is run; planted alone: on data no law is claimed",
    )
    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="of the bands")

    @model_validator(mode="after")
    def _content_is_there(self) -> Self:
        most = self.planted.latents if self.source == "planted" else 0
        for ladder in self.ladders:
            for rung in ladder.rungs:
                if rung.content > most:
                    raise ValueError(
                        f"content of rung {rung.name} of {ladder.name} must be at most "
                        f"planted.latents, and left out where the source is data; got "
                        f"{rung.content}, {most} are there"
                    )
        return self

    @model_validator(mode="after")
    def _law_fits(self) -> Self:
        ladders = {ladder.name: ladder for ladder in self.ladders}
        if len(ladders) < len(self.ladders):
            raise ValueError("ladders must have different names")
        _refuse_twins(self.seeds)
        if self.law is None:
            return self
        if self.source != "planted":
            raise ValueError(
                'law must be left out with source = "data": on real sets a ladder is reported, '
                "no law is claimed"
            )
        if self.law not in ladders:
            raise ValueError(f"law must name a ladder: {', '.join(ladders)}; got {self.law!r}")
        if len(ladders[self.law].rungs) < 4:
            raise ValueError(
                "the ladder of a law must have at least 4 rungs, 3 to fit and one to predict; got "
                f"{len(ladders[self.law].rungs)}"
            )
        return self


def _refuse_twins(seeds: tuple[int, ...]) -> None:
    if len({*seeds}) < len(seeds):
        raise ValueError(f"seeds must be different; got {', '.join(map(str, seeds))}")
