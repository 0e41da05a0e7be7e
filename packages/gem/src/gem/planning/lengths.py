"""How long histories are and how many ids an input brings, before any row is read.

Known for generated data; for other data whoever asks has to say it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gem.data.features import DataSpec
from gem.data.schema import BatchSchema, IdInput
from gem.data.synthetic_spec import SyntheticSpec
from gem_opkit.errors import ConfigError, refusal

_OP = "gem plan"
# Of an item the generator draws 0 to 3 tags, all alike; see gem.data.synthetic.
_MEAN_TAGS = 1.5


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """Distribution of the events of one example's history.

    Attributes:
        low: fewest events.
        high: most events.
        alpha: exponent of a Zipf law; 0 draws all lengths alike.
    """

    low: int
    high: int
    alpha: float = 0.0

    def quantiles(self, count: int, *, most: int | None = None) -> list[int]:
        """Lengths that stand for the law: one from the middle of each of ``count`` equal shares.

        Args:
            count: lengths wanted.
            most: longest history that is read; longer ones are cut.

        Returns:
            rising lengths.
        """
        if self.alpha == 0:
            span = self.high - self.low + 1
            drawn = [self.low + math.floor((i + 0.5) / count * span) for i in range(count)]
        else:
            drawn = self._zipf(count)
        return [length if most is None else min(length, most) for length in drawn]

    def _zipf(self, count: int) -> list[int]:
        """P(k) in proportion to (k - low + 1) ** -alpha."""
        weights = [(k + 1.0) ** -self.alpha for k in range(self.high - self.low + 1)]
        total, summed, place = sum(weights), 0.0, 0
        found: list[int] = []
        for i in range(count):
            wanted = (i + 0.5) / count * total
            while place < len(weights) - 1 and summed + weights[place] < wanted:
                summed += weights[place]
                place += 1
            found.append(self.low + place)
        return found


def length_laws(
    data: DataSpec, schema: BatchSchema, given: Mapping[str, LengthLaw]
) -> dict[str, LengthLaw]:
    """Say how long the histories of each stream are.

    Args:
        data: the recipe's section.
        schema: the inputs.
        given: stream -> law, which wins over what is known.

    Returns:
        stream -> law, for every stream of the schema.

    Raises:
        ConfigError: a stream that nothing is known of, or a law for one that does not exist.
    """
    names = [stream.name for stream in schema.streams]
    for name in given:
        if name not in names:
            raise ConfigError(
                refusal(
                    _OP,
                    "--lengths",
                    must=f"name a stream that is read ({', '.join(names) or 'there is none'})",
                    got=repr(name),
                    fix="correct the name",
                )
            )
    known = _generated(data)
    laws: dict[str, LengthLaw] = {}
    for stream in schema.streams:
        law = given.get(stream.name, known.get(stream.name))
        if law is None:
            raise ConfigError(
                refusal(
                    _OP,
                    "--lengths",
                    must=f"say how long the histories of stream {stream.name!r} are: data set "
                    f"{data.dataset!r} does not declare it",
                    got="nothing",
                    fix=f"give --lengths {stream.name}=1:{stream.max_events}, the fewest and the "
                    "most events, all lengths alike",
                )
            )
        laws[stream.name] = law
    return laws


def _generated(data: DataSpec) -> dict[str, LengthLaw]:
    """Laws of the generator; events that examples become later are left out."""
    if data.dataset != "synthetic":
        return {}
    options = data.synthetic or SyntheticSpec()
    most = options.max_backlog_events
    if most == 0:
        return {}
    alpha = options.length_alpha if options.length_law == "zipf" else 0.0
    clicks = max(1, round(most * options.click_rate))
    return {"impressions": LengthLaw(1, most, alpha), "clicks": LengthLaw(0, clicks, alpha)}


@dataclass(frozen=True, slots=True)
class IdLaw:
    """How the ids of one input are drawn.

    Attributes:
        mean: ids of an example, or of an event.
        zipf_exponent: skew of their popularity.
    """

    mean: float
    zipf_exponent: float = 0.0


def id_laws(
    data: DataSpec, inputs: Sequence[IdInput], given: Mapping[str, float]
) -> dict[str, IdLaw]:
    """Say how many ids an input brings.

    Args:
        data: the recipe's section.
        inputs: inputs of the examples.
        given: input -> mean number of ids of an example, for inputs with several.

    Returns:
        input -> law.

    Raises:
        ConfigError: an input with several ids that nothing is known of, or a name of none.
    """
    several = [source.name for source in inputs if source.multi]
    known = ", ".join(several) or "there is none"
    for name in given:
        if name not in several:
            raise ConfigError(
                refusal(
                    _OP,
                    "--ids",
                    must=f"name an input with several ids ({known})",
                    got=repr(name),
                    fix="correct or remove it",
                )
            )
    laws: dict[str, IdLaw] = {}
    for source in inputs:
        skew = id_skew(data, source.table)
        if not source.multi:
            laws[source.name] = IdLaw(1.0, skew)
            continue
        mean = given.get(source.name)
        if mean is None and data.dataset == "synthetic" and source.name == "tags":
            mean = _MEAN_TAGS
        if mean is None:
            raise ConfigError(
                refusal(
                    _OP,
                    "--ids",
                    must=f"say how many ids input {source.name!r} has: data set "
                    f"{data.dataset!r} does not declare it",
                    got="nothing",
                    fix=f"give --ids {source.name}=MEAN",
                )
            )
        laws[source.name] = IdLaw(mean, skew)
    return laws


def id_skew(data: DataSpec, table: str) -> float:
    """Skew of the ids that look up a table; 0, all rows alike, where nothing is known.

    Args:
        data: the recipe's section.
        table: its name.

    Returns:
        exponent of a Zipf law.
    """
    if data.dataset != "synthetic":
        return 0.0
    options = data.synthetic or SyntheticSpec()
    return options.id_alpha if table == "item" or table.startswith("feature_") else 0.0
