"""Time ``table_lookup`` and ``table_update`` against the fused tables of fbgemm.

The update merges the gradients of a batch by row and moves the rows by row-wise AdaGrad. The roof
counts each different row once. The peer is left out where fbgemm is not installed.

Run ``python packages/embeddings/benchmarks/bench_fused_tables.py`` in the repository's root.
"""

from collections.abc import Iterable, Sequence

from fused_works import FusedWork, fbgemm_calls

from gem_embeddings.kernels.table_lookup.cases import CASES, TableCase
from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group, run_script


def cases_of(case: TableCase, device: str) -> Sequence[BenchCase]:
    work = FusedWork(case, device)
    peers = fbgemm_calls(work)
    forward, update = work.costs()
    shapes = {
        "tables": case.tables,
        "rows": case.rows,
        "examples": case.examples,
        "ids": case.ids,
        "width": case.width,
        "pooling": case.pooling,
        "zipf": case.zipf,
    }
    calls = (
        ("forward", work.forward, work.check_forward, forward),
        ("update", work.update, work.check_update, update),
    )
    return [
        BenchCase(
            name=f"{case.name}_{name}",
            run=run,
            check=check,
            cost=cost,
            shapes=shapes,
            dtype=case.row_dtype,
            peers={"fbgemm": peers[name]} if peers else {},
        )
        for name, run, check, cost in calls
    ]


def groups_of(device: str) -> Iterable[Group]:
    for case in (case for case in CASES if device.startswith(case.device)):
        yield case.name, lambda case=case: cases_of(case, device)


if __name__ == "__main__":
    run_script("tables", groups_of)
