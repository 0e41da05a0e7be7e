"""Time ``table_update`` against the backward pass of fbgemm's fused tables.

Both merge the gradients of a batch by row and move the rows by row-wise AdaGrad. The roof counts
each different row once, and no sort. The peer is left out where fbgemm is not installed.

Run ``python packages/embeddings/benchmarks/bench_table_update.py`` in the repository's root.
"""

from fused_works import FusedWork, fbgemm_calls, groups_of, shapes_of

from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import run_script


def case_of(work: FusedWork) -> BenchCase:
    peers = fbgemm_calls(work)
    return BenchCase(
        name=work.case.name,
        run=work.update,
        check=work.check_update,
        cost=work.costs()[1],
        shapes=shapes_of(work.case),
        dtype=work.case.row_dtype,
        peers={"fbgemm": peers["update"]} if peers else {},
    )


if __name__ == "__main__":
    run_script("table_update", lambda device: groups_of(device, case_of))
