"""Inputs that broke other systems, and where each is tested.

Numbers are those of the list of public bug reports that this project keeps. Two more rows of its
section on parallelism concern tables and stand in the tests of gem-embeddings: 84 (a save while
replicas are being averaged) and 117 (plans that name ranks outside their group).
"""

import ast
from pathlib import Path

import pytest

STANDS_IN: dict[int, tuple[str, ...]] = {
    # A race between streams gives NaN once fresh memory is filled with it.
    70: (
        "distributed/test_parallelise.py::test_every_plan_trains_like_one_process",
        "distributed/test_parallelise.py::test_two_gpus_train_like_one_process",
    ),
    # Gradients of experts are wrong by the size of their axis, or of the world.
    71: (
        "distributed/test_parallelise.py::test_gradients_of_experts_are_means_over_all_ranks_too",
        "distributed/test_parallelise.py::test_every_plan_trains_like_one_process",
    ),
    # Sharding with and without replicas divides gradients differently.
    72: ("distributed/test_parallelise.py::test_every_plan_trains_like_one_process",),
    # The norm of sharded gradients with replicas is too large.
    73: ("distributed/test_parallelise.py::test_constant_gradients_have_the_norm_of_their_number",),
    # The norm is that of a part, or fails where parameters lie on several meshes.
    75: ("distributed/test_parallelise.py::test_every_plan_trains_like_one_process",),
    # A rank, or all ranks of an expert, without examples; with gradients and without.
    76: ("distributed/test_parallelise.py::test_every_plan_trains_like_one_process",),
    # A checkpoint holds the experts of one rank.
    77: (
        "distributed/test_dense_state.py::test_each_expert_comes_back_as_itself",
        "distributed/test_dense_state.py::test_a_run_goes_on_under_every_other_plan",
    ),
}


def names_of_tests(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", STANDS_IN)
def test_the_tests_of_a_row_are_there(row):
    for place in STANDS_IN[row]:
        file, _, name = place.partition("::")
        assert name in names_of_tests(Path(__file__).parent / file), place
