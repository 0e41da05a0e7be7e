"""Fill the tables of two stages and of students in docs/quality.md from the rows of results/cpu.

    python packages/gem/benchmarks/transfer_tables.py [--results DIR] [--page FILE]

A table stands between ``<!-- transfer stages -->`` or ``<!-- transfer student -->`` and
``<!-- end -->``. The rows are those of

    gem stages kuairand-stages --rows results
    gem bench ablation kuairand-student ... --rows results
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PAGE, RESULTS = ROOT / "docs" / "quality.md", ROOT / "results" / "cpu"
RANKERS = {"short": "10 events, no statistics", "statistics": "as shipped"}
Rows = list[dict[str, Any]]


def stages_table(rows: Rows) -> str:
    """Rankers without embeddings, and with those of an upstream model and of a smaller one."""
    lines = [
        "| ranker | task | NE without | NE with | with minus without, 95 % | better "
        "| NE upstream, smaller | whole | NE with the smaller | transfer ratio, of each seed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for ranker, words in RANKERS.items():
        for row in rows:
            if row["ranker"] != ranker or row["name"] != "kuairand-stages":
                continue
            gap, better = _gap(row["ne_with_minus_without"], "with", "without")
            ne = row["ne"]
            cells = [
                *(words, row["task"], _mean(ne["ranker_without"]), _mean(ne["ranker_with"])),
                *(gap, better, _mean(ne["upstream_base"]), _mean(ne["upstream"])),
                _mean(ne["ranker_with_base"]) if "ranker_with_base" in ne else "n/a",
                _ratio(row),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def student_table(rows: Rows) -> str:
    """A student alone, and taught in each way."""
    lines = [
        "| student | task | NE | AUC | NE minus alone, 95 % | better |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["recipe"] != "kuairand-student":
            continue
        gap = better = ""
        if row["ne_minus_base"] is not None:
            gap, better = _gap(row["ne_minus_base"], "taught", "alone")
        half = row["test_half_range"]
        spread = [f"{_figure(row['test'][k])} ± {_figure(half[k])}" for k in ("ne", "auc")]
        name = "alone" if row["variant"] == "base" else row["variant"]
        lines.append("| " + " | ".join([name, row["task"], *spread, gap, better]) + " |")
    return "\n".join(lines)


def _gap(gap: dict[str, float], first: str, second: str) -> tuple[str, str]:
    low, high = gap["low_95"], gap["high_95"]
    better = second if low > 0 else first if high < 0 else "neither"
    middle, low, high = (_figure(gap[k], sign=True) for k in ("ne_difference", "low_95", "high_95"))
    return f"{middle} ({low} to {high})", better


def _ratio(row: dict[str, Any]) -> str:
    """The ratio of the mean gains, and those of the seeds where each upstream model gains."""
    if row["transfer_ratio"] is None:
        return "n/a"
    below = "ranker_with_base" if "ranker_with_base" in row["ne"] else "ranker_without"
    sides = (below, "ranker_with", "upstream_base", "upstream")
    seeds = zip(*(row["ne"][side]["seeds"] for side in sides), strict=True)
    each = [
        _figure((before - after) / (low - high), sign=True, digits=2) if low > high else "n/a"
        for before, after, low, high in seeds
    ]
    return f"{_figure(row['transfer_ratio'], sign=True, digits=2)} ({', '.join(each)})"


def _mean(found: dict[str, Any]) -> str:
    return f"{_figure(found['mean'])} ± {_figure(found['half_range'])}"


def _figure(value: float, *, sign: bool = False, digits: int = 4) -> str:
    return re.sub(r"^([+-]?)0\.", r"\1.", f"{value:{'+' if sign else ''}.{digits}f}")


def read_rows(path: Path) -> Rows:
    """Rows of a file of results; none where it is not there."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


def main() -> None:
    """Read, fill, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    chosen = parser.parse_args()
    tables = {
        "stages": stages_table(read_rows(chosen.results / "stages.jsonl")),
        "student": student_table(read_rows(chosen.results / "ablation.jsonl")),
    }
    page = re.sub(
        r"(<!-- transfer (\S+) -->\n).*?(<!-- end -->)",
        lambda m: f"{m[1]}\n{tables[m[2]]}\n\n{m[3]}",
        chosen.page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    chosen.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
