"""Rows and picture of a ladder that `gem scaling` has climbed.

    gem scaling planted --out runs/scaling --jobs 16
    python packages/gem/benchmarks/bench_scaling.py runs/scaling

Nothing is measured here: each row holds the commit and the versions of the process that trained its
rung. ``results/<device>/scaling.jsonl`` gets a row a rung, and one for the law with what was
predicted and what came; ``--picture`` copies the plot, ``--page`` replaces what stands between
``<!-- measured RECIPE -->`` and ``<!-- end -->`` in a page.
"""

import argparse
import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

from gem.scaling.gains import falling
from gem.scaling.picture import GAIN_COLUMNS, gain_rows, law_words, synergy_words
from gem_opkit.bench import device_folder, write_rows

RESULTS = Path(__file__).resolve().parents[3] / "results"
END = "<!-- end -->"


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a rung that was trained, and one for the law."""
    name = Path(found["spec"]["recipe"]).stem
    rows = []
    for rung in found["rungs"]:
        if "same_as" in rung:
            continue
        own = {key: value for key, value in rung.items() if key != "provenance"}
        case = f"{name}, {rung['ladder']} {rung['rung']}, seed {rung['seed']}"
        rows.append({"bench": "scaling", "case": case, **own, **rung["provenance"]})
    if "law" in found:
        said = found["prediction"]
        last = next(
            r for r in found["rungs"] if (r["ladder"], r["rung"]) == (said["ladder"], said["rung"])
        )
        rows.append(
            {
                "bench": "scaling",
                "case": f"{name}, law of {said['ladder']}",
                "law": found["law"],
                "prediction": {key: value for key, value in said.items() if key != "law"},
                "outcome": found["outcome"],
                "seeds": sorted(
                    {r["seed"] for r in found["rungs"] if r["ladder"] == said["ladder"]}
                ),
                "device": last["device"],
                **last["provenance"],
            }
        )
    return rows


def page_part(found: dict[str, Any], picture: Path | None) -> str:
    """What a page says of a ladder."""
    spec, rungs = found["spec"], found["rungs"]
    seeds = ", ".join(str(seed) for seed in sorted({rung["seed"] for rung in rungs}))
    lines = [
        f"`{Path(spec['recipe']).stem}` on {rungs[0]['device']}: {rungs[0].get('examples'):,} "
        f"examples a rung, seeds {seeds}.\n",
        *law_words(found),
        *synergy_words(found),
        "",
    ]
    if picture is not None:
        lines += [f"![NE over FLOPs](images/{picture.name})", ""]
    lines += [
        "| ladder | rung | FLOPs an example | NE | still fell by | over seeds "
        "| weights outside of tables |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in dict.fromkeys((rung["ladder"], rung["rung"]) for rung in rungs):
        own = [rung for rung in rungs if (rung["ladder"], rung["rung"]) == name]
        ne = [next(iter(rung["ne"].values())) for rung in own]
        size, fell = own[0].get("parameters"), falling(own)
        weights = "" if size is None else f"{size['dense']:,}"
        still = "" if fell is None else f"{fell:.5f}"
        spread = "" if len(ne) == 1 else f"± {(max(ne) - min(ne)) / 2:.5f}"
        lines.append(
            f"| {' | '.join(name)} | {fmean(r['flops_per_example'] for r in own):.4g} | "
            f"{fmean(ne):.5f} | {still} | {spread} | {weights} |"
        )
    lines += [
        "",
        f"| {' | '.join(GAIN_COLUMNS)} |",
        "| --- | --- | --- | ---: | ---: | ---: |",
        *(f"| {' | '.join(cells)} |" for cells in gain_rows(found)),
    ]
    known = rungs[0].get("ne_of_rates")
    if known is not None:
        lines += ["", f"Who knows every taste would reach NE {known:.4f} on the same examples."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of gem scaling")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=None, metavar="FILE.svg")
    parser.add_argument("--page", type=Path, default=None, metavar="FILE.md")
    chosen = parser.parse_args()
    found = json.loads((chosen.folder / "scaling.json").read_text(encoding="utf-8"))
    rows = rows_of(found)
    write_rows(chosen.out / device_folder(rows[0]["device"]) / "scaling.jsonl", rows)
    if chosen.picture is not None:
        shutil.copyfile(chosen.folder / "scaling.svg", chosen.picture)
    if chosen.page is not None:
        begin = f"<!-- measured {Path(found['spec']['recipe']).stem} -->\n"
        before, rest = chosen.page.read_text(encoding="utf-8").split(begin)
        _, after = rest.split(END, 1)
        part = page_part(found, chosen.picture)
        chosen.page.write_text(before + begin + part + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
