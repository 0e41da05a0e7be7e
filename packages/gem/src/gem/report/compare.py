"""Several runs in one report: which are seeds of one recipe, and how far they lie apart."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from gem.report.read import RunRecord, number, pick
from gem.train.spec import RESUMABLE_KEYS
from gem_opkit.errors import ConfigError, refusal

# What may differ between two runs of one recipe: besides the seed, what does not change a result.
_NOT_THE_RECIPE = RESUMABLE_KEYS | {"seed", "name"}


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in nothing but their seed.

    Attributes:
        label: name in the page, different from that of every other group.
        runs: at least one.
    """

    label: str
    runs: tuple[RunRecord, ...]

    def values(self, *path: str | int) -> list[float]:
        """The numbers that the runs' summaries hold in one place; runs without one are left out.

        Args:
            path: keys into `summary.json`.
        """
        found = (number(pick(run.summary, *path)) for run in self.runs)
        return [value for value in found if value is not None]


@dataclass(frozen=True, slots=True)
class Spread:
    """Numbers of several runs.

    Attributes:
        mean: of them.
        deviation: sample standard deviation; None of a single one.
        count: how many.
    """

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Mean and deviation of some numbers.

        Args:
            values: finite numbers.

        Returns:
            None where there are none.
        """
        if not values:
            return None
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def check_one_data_set(runs: Sequence[RunRecord]) -> None:
    """Refuse runs whose numbers are not of the same rows.

    Args:
        runs: to be compared.

    Raises:
        ConfigError: two data sets differ, by name or by fingerprint.
    """
    first = runs[0]
    for run in runs[1:]:
        prints = (first.fingerprint, run.fingerprint)
        if run.dataset == first.dataset and (None in prints or prints[0] == prints[1]):
            continue
        raise ConfigError(
            refusal(
                "gem report",
                "RUN",
                must="be runs on one data set, as metrics of different rows do not compare",
                got=f"{_data(first)} in {first.folder} and {_data(run)} in {run.folder}",
                fix="make a report of each",
            )
        )


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Put runs of one recipe together, in the order in which the recipes come first.

    Args:
        runs: in the order of the command.

    Returns:
        The groups.
    """
    members: dict[str, list[RunRecord]] = {}
    for run in runs:
        members.setdefault(json.dumps(_recipe(run), sort_keys=True, default=str), []).append(run)
    groups = list(members.values())
    names = [group[0].recipe for group in groups]
    labels = [
        name if names.count(name) == 1 else group[0].folder.resolve().name
        for name, group in zip(names, groups, strict=True)
    ]
    labels = [
        label if labels.count(label) == 1 else f"{label}, {place}"
        for place, label in enumerate(labels, start=1)
    ]
    return [Group(label, tuple(group)) for label, group in zip(labels, groups, strict=True)]


def differences(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Settings in which recipes differ.

    Args:
        groups: at least one.

    Returns:
        Key and its value in each group; a dash where a recipe has no such key.
    """
    recipes = [_recipe(group.runs[0]) for group in groups]
    keys = sorted({key for recipe in recipes for key in recipe})
    return [
        (key, [_text(recipe[key]) if key in recipe else "–" for recipe in recipes])
        for key in keys
        if len({json.dumps(recipe.get(key), default=str) for recipe in recipes}) > 1
    ]


def flattened(value: Any, prefix: str = "") -> dict[str, Any]:
    """Full key -> value of a config, with lists left whole unless they hold tables.

    Args:
        value: a table.
        prefix: of all keys.
    """
    parts: Iterable[tuple[str, Any]]
    if isinstance(value, Mapping) and value:
        parts = value.items()
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        parts = ((str(part.get("name", i)), part) for i, part in enumerate(value))
    else:
        return {prefix: value}
    dot = "." if prefix else ""
    return {k: v for key, part in parts for k, v in flattened(part, f"{prefix}{dot}{key}").items()}


def wilson(positives: float, examples: float, *, z: float = 1.959964) -> tuple[float, float]:
    """Interval of a rate in which the true one lies in 95 of 100 cases (Wilson's score interval).

    Args:
        positives: from 0 to ``examples``.
        examples: above 0.
        z: quantile of the normal distribution.

    Returns:
        Lower and upper end, in [0, 1].

    Source: E. B. Wilson 1927, Journal of the American Statistical Association 22.
    """
    rate = positives / examples
    centre = rate + z * z / (2 * examples)
    half = z * math.sqrt(max(rate * (1 - rate) / examples + (z / (2 * examples)) ** 2, 0.0))
    scale = 1 + z * z / examples
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def _recipe(run: RunRecord) -> dict[str, Any]:
    config = flattened(run.config)
    return {key: value for key, value in config.items() if key not in _NOT_THE_RECIPE}


def _data(run: RunRecord) -> str:
    return f"{run.dataset} {run.fingerprint[:12]}" if run.fingerprint else run.dataset


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)
