"""Fill the tables of docs/quality.md from the rows of results/cpu/quality.jsonl.

    python packages/gem/benchmarks/quality_tables.py [--results FILE] [--page FILE]

A table stands between ``<!-- table PROTOCOL TASK -->`` and ``<!-- end -->``; with ``any`` behind
the task it is that of any number of passes. The tests of the repository read the page and the rows
by code of their own.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from bench_peers import PEERS, PROTOCOLS, ROOT, VARIANTS
from bench_quality import RESULTS

PAGE = ROOT / "docs" / "quality.md"
HEAD = (
    "| model | inputs | AUC | NE | calibration | NE minus ours, 95 % | better |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)
# Recipes of ours, by protocol; peers are compared with the first.
OURS = {
    "ml100k-time": ("ml100k-cross", "ml100k-time", "ml100k-din"),
    "kuairand-days": ("kuairand-days",),
}
Rows = list[dict[str, Any]]


def table(rows: Rows, protocol: str, task: str, passes: str = "one") -> str:
    """The table of one task: ours first, then the peers, by kind of inputs and NE."""
    lines = [HEAD]
    for variant, words in VARIANTS.items():
        settings = PROTOCOLS[protocol].settings(variant, passes)
        # Of any number of passes only the recipe that peers are compared with.
        for recipe in OURS[protocol] if passes == "one" else OURS[protocol][:1]:
            (row,) = (
                r
                for r in rows
                if r.get("recipe") == recipe
                and "seeds" in r
                and r["task"] == task
                and r["settings"] == settings
            )
            cells = _metrics(row["test"], row["half_range"]["test"])
            lines.append(_line([f"**{recipe}**", words, *cells, "", ""]))
        titles = [peer.title for peer in PEERS.values()]
        found = [
            r
            for r in rows
            if r.get("protocol") == protocol
            and r["task"] == task
            and r["inputs"] == words
            and r.get("passes", "one") == passes
            and r["model"] in titles
            and not r["settings"]
        ]
        for row in sorted(found, key=lambda r: r["mean"]["test"]["ne"]):
            cells = _metrics(row["mean"]["test"], row["half_range"]["test"])
            lines.append(_line([row["model"], words, *cells, *_against(row["against_ours"])]))
    return "\n".join(lines)


def _metrics(mean: dict[str, float], half_range: dict[str, float]) -> list[str]:
    auc, ne = (f"{_figure(mean[k])} ± {_figure(half_range[k])}" for k in ("auc", "ne"))
    return [auc, ne, _figure(mean["calibration"], digits=3)]


def _against(gap: dict[str, float]) -> list[str]:
    """The difference with its interval, and who is better where that leaves no doubt."""
    low, high = gap["low_95"], gap["high_95"]
    better = "ours" if low > 0 else "theirs" if high < 0 else "neither"
    middle, low, high = (_figure(gap[k], sign=True) for k in ("ne_difference", "low_95", "high_95"))
    return [f"{middle} ({low} to {high})", better]


def _between(rows: Rows) -> list[str]:
    """Our two recipes on MovieLens: difference of NE and its interval."""
    wanted = ["ml100k-time", "ml100k-din"]
    (row,) = (r for r in rows if r.get("recipes") == wanted and not r["settings"])
    return [_figure(row[key]) for key in ("ne_difference", "low_95", "high_95")]


def _figure(value: float, *, digits: int = 4, sign: bool = False) -> str:
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("0.", ".", 1)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Read, fill, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    chosen = parser.parse_args()
    rows = [json.loads(line) for line in chosen.results.read_text(encoding="utf-8").splitlines()]
    page = re.sub(
        r"(<!-- table (\S+) (\S+?)(?: (any))? -->\n).*?(<!-- end -->)",
        lambda m: f"{m[1]}\n{table(rows, m[2], m[3], m[4] or 'one')}\n\n{m[5]}",
        chosen.page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    middle, low, high = _between(rows)
    page = re.sub(
        r"resamples:(\s)\S+, 95 % between \S+ and \S+(?=\s)",
        rf"resamples:\g<1>{middle}, 95 % between {low} and {high}.",
        page,
    )
    chosen.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
