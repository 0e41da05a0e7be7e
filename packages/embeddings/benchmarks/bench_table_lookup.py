"""Time ``table_lookup`` against the lookups of fbgemm's fused tables.

The roof counts each different row once. The peer is left out where fbgemm is not installed.

Run ``python packages/embeddings/benchmarks/bench_table_lookup.py`` in the repository's root.
"""

from fused_works import FusedWork, fbgemm_calls, groups_of, shapes_of

from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import run_script


def case_of(work: FusedWork) -> BenchCase:
    peers = fbgemm_calls(work)
    return BenchCase(
        name=work.case.name,
        run=work.forward,
        check=work.check_forward,
        cost=work.costs()[0],
        shapes=shapes_of(work.case),
        dtype=work.case.row_dtype,
        peers={"fbgemm": peers["forward"]} if peers else {},
    )


if __name__ == "__main__":
    run_script("table_lookup", lambda device: groups_of(device, case_of))
