"""Plan 1.7 TB of tables for thousands of GPUs, and count one step's bytes in a dry run.

The plan is made for ``large_tables.toml`` as it is. The dry run makes the rows of one rank, so its
tables have a thousandth of the rows and its batch an eighth of the examples, and are planned anew;
each collective's bytes then stand beside those that the plan foresees.

Run ``python packages/embeddings/benchmarks/large_tables.py`` in the repository's root; with
``--results FILE`` its figures become rows.
"""

import argparse
import time
import tomllib
from pathlib import Path
from typing import Any

from gem_embeddings.dry_run import DryRun, dry_run
from gem_embeddings.plan import explain_tables
from gem_embeddings.planning.__main__ import figures, with_gpus
from gem_embeddings.planning.explain import Explanation
from gem_embeddings.planning.spec import PlanningFile
from gem_opkit.bench import provenance, write_rows

FILE = Path(__file__).with_name("large_tables.toml")
GPUS = (1024, 4096)
FEWER_ROWS, FEWER_EXAMPLES = 1000, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPUS), help="numbers of GPUs")
    parser.add_argument("--results", type=Path, help="file of rows to write")
    given = parser.parse_args()
    described = PlanningFile.model_validate(tomllib.loads(FILE.read_text(encoding="utf-8")))
    rows = []
    for gpus in given.gpus:
        started = time.process_time()
        explained = explained_for(described, gpus)
        seconds = time.process_time() - started
        print(explained.text(most_tables=12))
        print(f"planned in {seconds:.1f} s\n")
        counted = dry(described, gpus)
        for name, (planned, given_bytes) in counted.items():
            print(f"{gpus} ranks, dry run, {name}: planned {planned:,}, counted {given_bytes:,}")
        rows.append(
            {
                "bench": "large_tables",
                "case": f"{gpus} GPUs",
                "gpus": gpus,
                "table_bytes": sum(t.weight_bytes for t in described.expanded()[0]),
                "seconds": seconds,
                **figures(explained),
                "dry_run": {n: {"planned": p, "counted": c} for n, (p, c) in counted.items()},
            }
        )
    if given.results:
        origin = provenance()
        write_rows(given.results, [{**row, "device": "cpu", **origin} for row in rows])


def explained_for(described: PlanningFile, gpus: int) -> Explanation:
    tables, planning = described.expanded()
    return explain_tables(tables, optimizer=described.optimizer, planning=with_gpus(planning, gpus))


def dry(described: PlanningFile, gpus: int) -> dict[str, tuple[int, int]]:
    """Return collective -> bytes that a rank gives to it: planned, and counted in a dry run."""
    small = shrunk(described)
    explained = explained_for(small, gpus)
    tables, planning = small.expanded()
    ran = dry_run(
        tables,
        (),
        explained.plan,
        small.optimizer,
        {load.feature_name: load for load in planning.loads},
        batch_per_rank=planning.batch_per_rank,
        wire_dtype=planning.wire_dtype,
    )
    return beside(explained, ran)


def shrunk(described: PlanningFile) -> PlanningFile:
    families = [
        family.model_copy(
            update={
                "least_rows": max(10, family.least_rows // FEWER_ROWS),
                "most_rows": max(10, family.most_rows // FEWER_ROWS),
            }
        )
        for family in described.families
    ]
    planning = described.planning.model_copy(
        update={"batch_per_rank": described.planning.batch_per_rank // FEWER_EXAMPLES}
    )
    return described.model_copy(update={"families": tuple(families), "planning": planning})


def beside(explained: Explanation, ran: DryRun) -> dict[str, tuple[int, int]]:
    solution = explained.solution
    mean: dict[str, Any] = {e.name: e.rank_bytes for e in solution.step.exchanges}
    # Rank 0 answers for what it holds; what it asks for is the mean over ranks.
    ranks = solution.loads.ranks
    own = [way.part for name, way in solution.chosen.items() if 0 in way.holders(ranks[name])]
    counts, ids, *vectors = ran.forward_bytes["table_shard", "all_to_all"]
    backward = sum(ran.backward_bytes["table_shard", "all_to_all"])
    squares = sum(part.square_bytes for part in own)
    found = {
        "counts": (mean["counts"], counts),
        "ids": (mean["ids"], ids),
        "vectors of rank 0": (sum(part.vector_bytes for part in own), sum(vectors)),
        "gradients and square sums of rank 0": (mean["gradients"] + squares, backward),
        "held by rank 0": (explained.plan.group_rank_bytes()[0], ran.held_bytes),
    }
    return {name: (round(planned), counted) for name, (planned, counted) in found.items()}


if __name__ == "__main__":
    main()
