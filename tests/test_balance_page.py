"""The table of the page on balance is that of the committed rows, and meets what is promised."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WAYS = ("off", "snake", "rounds", "within_group", "group", "global")


def rows() -> dict[tuple[str, int, int, int], dict]:
    file = ROOT / "results" / "cpu" / "balance.jsonl"
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {(r["kind"], r["ranks"], r["base_batch"], r["longest"]): r for r in found}


def shown() -> dict[tuple[str, int, int, int], list[float]]:
    found = {}
    for line in (ROOT / "docs" / "balance.md").read_text(encoding="utf-8").splitlines():
        kind, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if kind in ("linear", "quadratic"):
            ranks, base_batch, longest = (int(cell.replace(",", "")) for cell in cells[:3])
            found[kind, ranks, base_batch, longest] = [float(cell) for cell in cells[3:]]
    return found


def test_the_table_is_the_rows():
    page, wanted = shown(), rows()
    assert page.keys() == wanted.keys()
    assert len(page) == 20
    for case, ratios in page.items():
        row = wanted[case]
        found = [*(row["max_over_mean"][way] for way in WAYS), row["worst"]["global"]]
        assert ratios == pytest.approx(found, abs=0.5001e-4), case


@pytest.mark.parametrize(
    ("kind", "ranks", "limit"),
    [
        *(("linear", ranks, 1.02) for ranks in (2, 8)),
        ("quadratic", 2, 1.02),
        ("quadratic", 8, 1.03),
    ],
)
def test_ranks_come_out_as_even_as_promised(kind, ranks, limit):
    row = rows()[kind, ranks, 128, 2048]
    assert row["examples_a_rank"] == 1024
    assert row["max_over_mean"]["global"] < limit < row["max_over_mean"]["off"]
    assert row["max_over_mean"]["group"] < limit
