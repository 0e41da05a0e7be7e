"""`gem plan`: the best plans for a recipe on some machines, with what each costs and why."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from gem.config import RunConfig, load_recipe
from gem.planning.chosen import names_a_plan, plan_of_recipe, with_whole_axes
from gem.planning.lengths import LengthLaw
from gem.planning.measured_rows import read_rows
from gem.planning.rates import DEFAULT, Calibrated, calibrated
from gem.planning.tables import TablesOf, tables_of
from gem.planning.work import work_of
from gem.train.balance_check import check_balance
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import TableCopies, Topology
from gem_parallel.planning.forecast import Forecast, forecast
from gem_parallel.planning.planner import Search, search
from gem_parallel.planning.work import Work
from gem_parallel.topology import PRESETS, read_topology, scaled_to

# Without a topology: the smallest of these that has the ranks.
_BY_SIZE = ("h200", "h200x2", "h200x8", "gem4096")
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command was asked.

    Attributes:
        recipe: name or path.
        gpus: ranks.
        topology: preset or path; None for H200s.
        settings: keys of the recipe that are replaced.
        axes: texts ``axis=size`` that every plan must have.
        batch: examples of a rank; None for the recipe's batch on each rank.
        lengths: texts ``stream=low:high``.
        ids: texts ``input=mean``.
        calibrate: results file; None for the rates that ship.
        most: plans wanted.
    """

    recipe: str
    gpus: int
    topology: str | None = None
    settings: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    batch: int | None = None
    lengths: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    calibrate: Path | None = None
    most: int = 5


@dataclass(frozen=True, slots=True)
class Planned:
    """What the command answers.

    Attributes:
        asked: what was asked.
        config: the recipe.
        topology: machines, of as many ranks.
        work: of one rank.
        tables: of the recipe.
        lengths: stream -> how long its histories are, as the command was told.
        search: the best plans.
        given: forecast of the plan that the recipe itself names; None where it names none.
        sources: where the rates are from.
        seconds: how long it took.
    """

    asked: Asked
    config: RunConfig
    topology: Topology
    work: Work
    tables: TablesOf
    lengths: Mapping[str, LengthLaw]
    search: Search
    given: Forecast | None
    sources: tuple[str, ...]
    seconds: float


def plan_recipe(asked: Asked) -> Planned:
    """Answer the command.

    Args:
        asked: what was asked.

    Returns:
        the answer.

    Raises:
        ConfigError: a word that means nothing, statistics that nobody has said, machines that do
            not have the ranks, a balance that the trainer refuses, or no plan that fits.
    """
    began = time.perf_counter()
    topology = _topology(asked)
    config = load_recipe(asked.recipe, asked.settings)
    lengths, ids = _lengths(asked.lengths), _means(asked.ids)
    fitted = Calibrated(DEFAULT, topology)
    if asked.calibrate is not None:
        fitted = calibrated(read_rows(asked.calibrate), topology)
    work = work_of(config, examples=asked.batch, lengths=lengths, ids=ids)
    if config.parallel is not None:
        # As the trainer will, on the batch of all ranks.
        batch = {"batch_examples": work.examples * asked.gpus}
        whole = config.model_copy(update={"train": config.train.model_copy(update=batch)})
        check_balance(whole, config.parallel, asked.gpus)
    tables = tables_of(config, examples=work.examples, lengths=lengths, ids=ids)
    found = search(
        work,
        fitted.topology,
        tables=tables.step,
        rates=fitted.rates,
        fixed=with_whole_axes(config, _axes(asked.axes)),
        like=plan_of_recipe(config),
        most=asked.most,
    )
    given = None
    if names_a_plan(config):
        plan = plan_of_recipe(config)
        plan.check_world(asked.gpus)
        step = tables.step(plan, fitted.topology)
        given = forecast(work, plan, fitted.topology, tables=step, rates=fitted.rates)
    return Planned(
        asked=asked,
        config=config,
        topology=fitted.topology,
        work=work,
        tables=tables,
        lengths=lengths,
        search=found,
        given=given,
        sources=fitted.rates.sources,
        seconds=time.perf_counter() - began,
    )


def _topology(asked: Asked) -> Topology:
    if asked.topology is not None:
        return scaled_to(read_topology(asked.topology), asked.gpus)
    return default_topology(asked.gpus)


def default_topology(gpus: int) -> Topology:
    """The machines that are planned for where nobody names others: hosts of eight H200.

    Args:
        gpus: ranks.

    Returns:
        the smallest preset that has the ranks, cut down to them.

    Raises:
        ConfigError: more ranks than the largest preset has, or hosts that are half used.
    """
    for name in _BY_SIZE:
        if gpus <= PRESETS[name].world_size:
            return scaled_to(PRESETS[name], gpus)
    return scaled_to(PRESETS[_BY_SIZE[-1]], gpus)  # which says how many there are


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise _bad(option, text, example)
    return name.strip(), value.strip()


def _bad(option: str, text: str, example: str) -> ConfigError:
    return ConfigError(
        refusal(
            "gem plan",
            option,
            must=f"look like {example}",
            got=repr(text),
            fix="write it like that",
        )
    )


def _lengths(texts: Sequence[str]) -> dict[str, LengthLaw]:
    laws: dict[str, LengthLaw] = {}
    for text in texts:
        name, value = _pair("--lengths", text, "clicks=1:200")
        low, colon, high = value.partition(":")
        fewest, longest = _whole(low), _whole(high)
        if not colon or fewest is None or longest is None or fewest > longest:
            raise _bad("--lengths", text, "clicks=1:200, fewest and most events")
        _once("--lengths", name, laws)
        laws[name] = LengthLaw(fewest, longest)
    return laws


def _means(texts: Sequence[str]) -> dict[str, float]:
    means: dict[str, float] = {}
    for text in texts:
        name, value = _pair("--ids", text, "genres=2.5")
        try:
            mean = float(value)
        except ValueError:
            raise _bad("--ids", text, "genres=2.5") from None
        if not 0 < mean < math.inf:
            raise _bad("--ids", text, "genres=2.5, more than none")
        _once("--ids", name, means)
        means[name] = mean
    return means


def _axes(texts: Sequence[str]) -> dict[str, int | bool | str]:
    fixed: dict[str, int | bool | str] = {}
    for text in texts:
        name, value = _pair("--axis", text, "shard=8")
        _once("--axis", name, fixed)
        if name == "fully_sharded_tables" and value in ("true", "false"):
            fixed[name] = value == "true"
        elif name == "table_copies" and value in get_args(TableCopies):
            fixed[name] = value
        elif size := _whole(value):
            fixed[name] = size
        else:
            raise _bad("--axis", text, "shard=8, fully_sharded_tables=true or table_copies=far")
    return fixed


def _whole(text: str) -> int | None:
    """A whole number in decimal digits; None for other words, and for one beyond all counts."""
    # `isdigit` alone takes a superscript, which `int` does not.
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def _once(option: str, name: str, given: Mapping[str, object]) -> None:
    if name in given:
        raise ConfigError(
            refusal(
                "gem plan",
                option,
                must="name each thing once",
                got=f"{name!r} twice",
                fix="leave one of them out",
            )
        )
