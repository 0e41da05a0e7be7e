"""The tables of docs/memory.md, from the rows of bench_memory.py and bench_precision_ne.py.

    python packages/gem/benchmarks/memory_tables.py [--results results] [--page docs/memory.md]

Replaces what stands between ``<!-- rows -->`` and ``<!-- end of rows -->`` in the page.
"""

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
BEGIN, END = "<!-- rows -->\n", "<!-- end of rows -->"
GIB = 2**30
KEPT = ("kept_fp8", "kept_fp4")


def tables(results: Path) -> str:
    """Everything between the marks."""
    rows = _rows(results / "h200" / "memory.jsonl")
    parts = []
    # A table a run: what two commits measured is not to be compared.
    for examples, commit in dict.fromkeys((_examples(row), row["commit"]) for row in rows):
        own = [row for row in rows if (_examples(row), row["commit"]) == (examples, commit)]
        parts += [_plans(examples, commit, own), _regions(examples, own)]
    for folder in sorted(results.iterdir()):
        if (folder / "precision_ne.jsonl").is_file():
            parts.append(_ne(folder.name, _rows(folder / "precision_ne.jsonl")))
    return "\n".join(part for part in parts if part)


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _examples(row: dict[str, Any]) -> int:
    return int(row["case"].split(", ")[1].split()[0])


def _plan(row: dict[str, Any]) -> str:
    return row["case"].split(" examples, ", 1)[1]


def _plans(examples: int, commit: str, rows: list[dict[str, Any]]) -> str:
    lines = [
        f"`h200`, {examples:,} examples on one H200, commit {commit[:7]}:\n",
        "| plan | planned, GiB kept | counted | work again, ms by the plan | step, ms | "
        "fastest | peak of the GPU, GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if not row["fits"]:
            lines.append(f"| {_plan(row)} | | | | does not fit | | |")
            continue
        planned = f"{row['kept_bytes'] / GIB:.2f}" if "kept_bytes" in row else ""
        counted = f"{row['counted_bytes'] / GIB:.2f}" if "counted_bytes" in row else ""
        again = f"{row['again_ms']:.1f}" if "again_ms" in row else ""
        lines.append(
            f"| {_plan(row)} | {planned} | {counted} | {again} | {row['step_ms']:.1f} | "
            f"{row['step_ms_fastest']:.1f} | {row['peak_bytes'] / GIB:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _regions(examples: int, rows: list[dict[str, Any]]) -> str:
    """What becomes of each region under each budget."""
    asked = [row for row in rows if _plan(row).startswith("budget of") and "plan" in row]
    if not asked:
        return ""
    names = [_plan(row).removeprefix("budget of ") for row in asked]
    lines = [
        f"What becomes of each region of it, {examples:,} examples: GiB that it keeps, and what is "
        "made again, ms.\n",
        f"| region | saved, GiB | {' | '.join(names)} |",
        "| --- | ---: |" + " --- |" * len(names),
    ]
    for place, region in enumerate(asked[0]["plan"]["regions"]):
        cells = []
        for row in asked:
            own = row["plan"]["regions"][place]
            kept = f"{own['kept_bytes'] / GIB:.2f}"
            if own["kind"] == "keep":
                cells.append(f"{kept}, all kept")
            else:
                again = ", ".join(dict.fromkeys(_short(name) for name in own["again"]))
                cells.append(f"{kept}; again in {own['again_ms']:.2f}: {again}")
        saved = region["saved_bytes"] / GIB
        lines.append(f"| `{region['region']}` | {saved:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    return name.split()[0].removesuffix(".default").split(".", 1)[1]


def _ne(device: str, rows: list[dict[str, Any]]) -> str:
    rows = [row for row in rows if row["precision"] in KEPT]
    if not rows:
        return ""
    lines = [
        f"NE of `{rows[0]['recipe']}` on `{device}` with every activation packed, beside the plain "
        "runs of the same seeds; what another seed makes by itself stands last.\n",
        "| `kept` | task | difference of NE | 95 % interval | between seeds |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| `{row['precision'].removeprefix('kept_')}` | `{row['task']}` | "
        f"{row['ne_difference']:+.5f} | {row['low_95']:+.5f} to {row['high_95']:+.5f} | "
        f"{row['bf16_between_seeds']:.5f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace the tables of the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "memory.md")
    chosen = parser.parse_args()
    text = chosen.page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    chosen.page.write_text(before + BEGIN + tables(chosen.results) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
