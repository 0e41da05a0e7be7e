"""Fill the tables of ablations in docs/models.md from results/cpu/ablation.jsonl.

    python packages/gem/benchmarks/ablation_tables.py [--results DIR] [--page FILE]

A table stands between ``<!-- rows ablation RECIPE TASK -->`` and ``<!-- end -->``. Its rows are
those of ``gem bench ablation RECIPE --rows results``, in the order of the file.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from transfer_tables import RESULTS, ROOT, Rows, read_rows

PAGE = ROOT / "docs" / "models.md"
HEAD = (
    "| variant | seeds | valid NE | test NE | test AUC | NE minus base, 95 % | it is "
    "| MFLOP an example | examples/s |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def ablation_table(rows: Rows, recipe: str, task: str) -> str:
    """A line for each variant of a recipe that has a row."""
    own = [row for row in rows if (row["recipe"], row["task"]) == (recipe, task)]
    return "\n".join([HEAD, *(_line(row) for row in own)])


def _line(row: dict[str, Any]) -> str:
    gap, against, verdict = row["ne_minus_base"], "", ""
    if gap is not None:
        middle, low, high = (_figure(gap[k], "+") for k in ("ne_difference", "low_95", "high_95"))
        against = f"{middle} ({low} to {high})"
        verdict = "worse" if gap["low_95"] > 0 else "better" if gap["high_95"] < 0 else "neither"
    spread = [
        f"{_figure(row[split][key])} ± {_figure(row[f'{split}_half_range'][key])}"
        for split, key in (("valid", "ne"), ("test", "ne"), ("test", "auc"))
    ]
    flops, speed = f"{row['flops_per_example'] / 1e6:.2f}", f"{row['examples_per_s']:,.0f}"
    cells = [row["variant"], str(len(row["seeds"])), *spread, against, verdict, flops, speed]
    return "| " + " | ".join(cells) + " |"


def _figure(value: float, sign: str = "") -> str:
    return re.sub(r"^([+-]?)0\.", r"\1.", f"{value:{sign}.4f}")


def main() -> None:
    """Read, fill, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    chosen = parser.parse_args()
    rows = read_rows(chosen.results / "ablation.jsonl")
    page = re.sub(
        r"(<!-- rows ablation (\S+) (\S+) -->\n).*?(<!-- end -->)",
        lambda m: f"{m[1]}\n{ablation_table(rows, m[2], m[3])}\n\n{m[4]}",
        chosen.page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    chosen.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
