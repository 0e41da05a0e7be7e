"""Plots as SVG text, drawn with the page's own colours and letters.

Own code and no plotting library: the page has to follow the reader's light or dark theme and be
legible on a phone, which takes marks that a style sheet can colour and a second drawing at another
width; and it must not grow by the megabytes of a script. What is needed is lines, bars and axes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Literal

from gem.report.words import percent, short

Kind = Literal["number", "percent", "time"]
Point = tuple[float, float]

_SECOND = 1000
_DAY = 86_400_000
# Steps of a time axis, in milliseconds.
_TIME_STEPS = (
    *(n * _SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * 60 * _SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * 3600 * _SECOND for n in (1, 2, 3, 6, 12)),
    *(n * _DAY for n in (1, 2, 7, 14, 30, 60, 90, 180, 365, 730, 3650)),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How large a plot is drawn; the page shows the drawing that fits the window.

    Attributes:
        name: class of the drawing: ``wide`` or ``narrow``.
        width: units, about pixels.
        height: units.
        x_ticks: about so many.
        y_ticks: about so many.
    """

    name: str
    width: int
    height: int
    x_ticks: int
    y_ticks: int


FULL = Size("wide", 1060, 300, 9, 5)
HALF = Size("wide", 500, 290, 5, 5)
NARROW = Size("narrow", 350, 260, 4, 5)

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 10, 42
# Of a letter of an axis, and what stands left of the letters: the label of the axis.
_LETTER, _BESIDE = 7, 28


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values, and how they are written.

    Attributes:
        low: first value.
        high: last value, above ``low``.
        label: what the values are, with their unit.
        kind: how a value is written; a time is milliseconds since 1970.
    """

    low: float
    high: float
    label: str
    kind: Kind = "number"

    @classmethod
    def around(
        cls, values: Iterable[float], label: str, kind: Kind = "number", *, room: float = 0.05
    ) -> "Axis":
        """An axis that holds some values.

        Args:
            values: finite numbers; none at all gives 0 to 1.
            label: of the axis.
            kind: of the axis.
            room: share of the range that is added at both ends.
        """
        found = list(values)
        low, high = (min(found), max(found)) if found else (0.0, 1.0)
        if high <= low:  # one value only: it stands in the middle
            half = abs(low) * 0.1 or 0.5
            return cls(low - half, high + half, label, kind)
        extra = room * (high - low)
        return cls(low - extra, high + extra, label, kind)

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """Where the axis is marked, and with what.

        Args:
            count: about so many.
        """
        if self.kind == "time":
            return _time_ticks(self.low, self.high, count)
        step = _nice_step((self.high - self.low) / max(count, 1))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        values = [step * n for n in range(first, last + 1)]
        if self.kind == "percent":
            return [(value, percent(value, _decimals(100 * step))) for value in values]
        if 1e-4 <= step < 1:
            return [(value, f"{value:.{_decimals(step)}f}") for value in values]
        return [(value, short(value)) for value in values]


class Plot:
    """A drawing with two axes. Marks are added in their order; later ones lie above.

    Args:
        size: of the drawing.
        x: horizontal axis.
        y: vertical axis.
        alt: what the plot shows, for who cannot see it.
        x_ticks: marks of the horizontal axis, in place of its own.
    """

    def __init__(
        self,
        size: Size,
        x: Axis,
        y: Axis,
        alt: str,
        *,
        x_ticks: Sequence[tuple[float, str]] | None = None,
    ) -> None:
        self.size, self.x, self.y, self._alt = size, x, y, alt
        self._x_ticks = x.ticks(size.x_ticks) if x_ticks is None else list(x_ticks)
        self._y_ticks = y.ticks(size.y_ticks)
        longest = max((len(text) for _, text in self._y_ticks), default=0)
        self._left = max(_LEFT, _BESIDE + _LETTER * longest)
        self._inner_width = size.width - self._left - _RIGHT
        self._inner_height = size.height - _TOP - _BOTTOM
        self._marks: list[str] = []

    def line(self, points: Sequence[Point], style: str) -> None:
        """Join points.

        Args:
            points: in data units.
            style: class names.
        """
        if len(points) == 1:
            self.dots([(points[0], "")], style)
        elif points:
            joined = " ".join(self._at(*point) for point in points)
            self._marks.append(f'<polyline class="line {style}" points="{joined}"/>')

    def band(self, lower: Sequence[Point], upper: Sequence[Point], style: str) -> None:
        """Fill what lies between two lines.

        Args:
            lower: points.
            upper: points.
            style: class names.
        """
        if len(lower) > 1:
            joined = " ".join(self._at(*point) for point in (*lower, *reversed(upper)))
            self._marks.append(f'<polygon class="band {style}" points="{joined}"/>')

    def dots(self, points: Iterable[tuple[Point, str]], style: str) -> None:
        """Draw dots.

        Args:
            points: each with the text that shows when it is pointed at.
            style: class names.
        """
        for (x, y), text in points:
            title = f"<title>{escape(text)}</title>" if text else ""
            self._marks.append(
                f'<circle class="dot {style}" cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" '
                f'r="3.6">{title}</circle>'
            )

    def whisker(self, x: float, low: float, high: float, style: str) -> None:
        """Draw an interval.

        Args:
            x: where it stands.
            low: lower end.
            high: upper end.
            style: class names.
        """
        self.line_between((x, low), (x, high), f"whisker {style}")

    def bar(self, left: float, right: float, top: float, style: str, text: str = "") -> None:
        """Draw a bar that stands on the axis.

        Args:
            left: where it begins.
            right: where it ends.
            top: its height.
            style: class names.
            text: shows when it is pointed at.
        """
        x, width = self._x(left), self._x(right) - self._x(left)
        gap = min(1.5, 0.15 * width)
        y = self._y(top)
        title = f"<title>{escape(text)}</title>" if text else ""
        self._marks.append(
            f'<rect class="bar {style}" x="{x + gap / 2:.1f}" y="{y:.1f}" '
            f'width="{max(width - gap, 0.6):.1f}" height="{max(self._inner_height - y, 0):.1f}" '
            f'rx="1.5">{title}</rect>'
        )

    def shade(self, left: float, right: float, text: str) -> None:
        """Tint a range of the horizontal axis and name it.

        Args:
            left: where it begins.
            right: where it ends.
            text: its name.
        """
        x, end = self._x(left), self._x(right)
        self._marks.append(
            f'<rect class="shade" x="{x:.1f}" y="0" width="{max(end - x, 1):.1f}" '
            f'height="{self._inner_height}"/>'
            f'<text class="note" x="{(x + end) / 2:.1f}" y="12" text-anchor="middle">'
            f"{escape(text)}</text>"
        )

    def line_between(self, start: Point, end: Point, style: str) -> None:
        """Draw a straight line.

        Args:
            start: one end.
            end: the other.
            style: class names.
        """
        (x1, y1), (x2, y2) = start, end
        self._marks.append(
            f'<line class="{style}" x1="{self._x(x1):.1f}" y1="{self._y(y1):.1f}" '
            f'x2="{self._x(x2):.1f}" y2="{self._y(y2):.1f}"/>'
        )

    def note(self, x: float, y: float, text: str, *, anchor: str = "start") -> None:
        """Write words beside a mark.

        Args:
            x: where.
            y: where; the words stand above, or below where there is no room.
            text: the words.
            anchor: ``start``, ``middle`` or ``end``.
        """
        above = self._y(y) - 5
        place = above if above > 12 else above + 20
        self._marks.append(
            f'<text class="note" x="{self._x(x):.1f}" y="{place:.1f}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """The drawing as an SVG element."""
        width, height = self.size.width, self.size.height
        floor, right = height - _BOTTOM, width - _RIGHT
        parts = [
            f'<svg class="plot {self.size.name}" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(self._alt, quote=True)}">'
        ]
        for value, text in self._y_ticks:
            y = _TOP + self._y(value)
            parts.append(
                f'<line class="grid" x1="{self._left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
                f'<text class="tick" x="{self._left - 7}" y="{y + 4:.1f}" text-anchor="end">'
                f"{escape(text)}</text>"
            )
        for value, text in self._x_ticks:
            x = self._left + self._x(value)
            anchor = "end" if x > right - 16 and len(text) > 4 else "middle"
            parts.append(
                f'<line class="axis" x1="{x:.1f}" y1="{floor}" x2="{x:.1f}" y2="{floor + 4}"/>'
                f'<text class="tick" x="{x:.1f}" y="{floor + 17}" text-anchor="{anchor}">'
                f"{escape(text)}</text>"
            )
        parts.append(
            f'<svg x="{self._left}" y="{_TOP}" width="{self._inner_width}" '
            f'height="{self._inner_height}">{"".join(self._marks)}</svg>'
            f'<line class="axis" x1="{self._left}" y1="{floor}" x2="{right}" y2="{floor}"/>'
            f'<text class="label" x="{(self._left + right) / 2:.0f}" y="{height - 6}" '
            f'text-anchor="middle">{escape(self.x.label)}</text>'
            f'<text class="label" transform="translate(13 {(_TOP + floor) / 2:.0f}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y.label)}</text></svg>'
        )
        return "".join(parts)

    def _x(self, value: float) -> float:
        return (value - self.x.low) / (self.x.high - self.x.low) * self._inner_width

    def _y(self, value: float) -> float:
        share = (value - self.y.low) / (self.y.high - self.y.low)
        # Far outside is outside: some viewers draw nothing at all for coordinates of 1e30.
        return min(max((1 - share) * self._inner_height, -9999.0), 9999.0)

    def _at(self, x: float, y: float) -> str:
        return f"{self._x(x):.1f},{self._y(y):.1f}"


def _nice_step(rough: float) -> float:
    """The next of 1, 2, 2.5, 5, 10 times a power of ten, or the last one if it is near."""
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(n * power for n in (1, 2, 2.5, 5, 10, 20) if n * power >= 0.8 * rough)


def _decimals(step: float) -> int:
    """Digits behind the point that tell multiples of a step apart."""
    return next((d for d in range(9) if abs(round(step, d) - step) < 1e-6 * step), 9)


def _time_ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    step = next((s for s in _TIME_STEPS if (high - low) / s <= count), None)
    if step is None:  # thousands of years are no times
        return [(value, short(value)) for value in (low, high)]
    first = math.ceil(low / step)
    values = [step * n for n in range(first, math.floor(high / step) + 1)]
    form = "%H:%M:%S" if step < 60 * _SECOND else "%H:%M" if step < _DAY else "%d %b"
    if step >= 180 * _DAY:
        form = "%b %Y"
    elif step < _DAY and high - low > _DAY:
        form = "%d %b %H:%M"
    try:
        return [(v, datetime.fromtimestamp(v / 1000, UTC).strftime(form)) for v in values]
    except (OverflowError, ValueError, OSError):
        return [(value, short(value)) for value in (low, high)]
