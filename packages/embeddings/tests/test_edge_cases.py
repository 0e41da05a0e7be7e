"""Inputs that broke other systems, and where each is tested.

Numbers are those of the list of public bug reports that this project keeps. ``STANDS_IN`` names
the tests of each row that concerns tables. Below follow the tests that belong nowhere else.
"""

import ast
from pathlib import Path

import pytest
import torch

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.ops import FeatureSlot, TableLayout, TableSlot, table_lookup, table_update

STANDS_IN: dict[int, tuple[str, ...]] = {
    # Places beyond 2^31.
    15: (
        "test_tables.py::test_row_numbers_pass_int32",
        "test_edge_cases.py::test_places_beyond_int32_are_read_and_moved",
        "torchrec_engine/test_keyed.py::test_more_ids_than_int32_counts",
    ),
    # No ids at all.
    20: (
        "test_tables.py::test_a_batch_of_none_and_a_batch_of_empty_examples",
        "matrix/test_prefetch.py::test_no_batches_at_all_and_a_rank_without_an_empty_batch",
        "torchrec_engine/test_keyed.py::test_keys_without_any_example",
    ),
    # Lengths that do not fit the ids.
    21: (
        "test_tables.py::test_lengths_that_do_not_match_the_ids_name_both_numbers",
        "matrix/test_bad_input.py::test_a_bad_batch_on_one_rank_is_refused_on_all",
        "torchrec_engine/test_keyed.py::test_lengths_that_do_not_divide_name_both_numbers",
    ),
    # Features in another order, twice over, lose their weights.
    23: (
        "test_tables.py::test_order_of_features_and_foreign_features_do_not_matter",
        "torchrec_engine/test_keyed.py::test_two_permutations_keep_weights",
    ),
    # Replicas write overlapping pieces.
    83: ("matrix/test_checkpoint.py::test_replicas_write_each_element_once",),
    # A save while replicas are being averaged.
    84: ("matrix/test_checkpoint.py::test_saved_on_two_by_two_ranks_and_continued_elsewhere",),
    # Resharding.
    86: (
        "test_pieces.py::test_any_cut_on_four_ranks_is_read_under_any_cut_on_any_ranks",
        "matrix/test_checkpoint.py::test_saved_on_two_by_two_ranks_and_continued_elsewhere",
        "test_optimizer.py::test_distributed_checkpoint_resumes_tables_of_two_widths",
    ),
    # Step and learning rate are lost with the optimizer.
    87: (
        "test_optimizer.py::test_resumed_at_step_7_equals_unbroken_bit_for_bit",
        "matrix/test_checkpoint.py::test_saved_on_two_by_two_ranks_and_continued_elsewhere",
    ),
    # Rows over ranks on a CPU.
    88: (
        "matrix/test_engines.py::test_an_engine_trains_as_whole_tables_do_or_names_what_it_cannot",
    ),
    # Ranks with fewer batches, or none.
    90: ("matrix/test_prefetch.py::test_ranks_with_zero_two_and_three_batches_do_not_hang",),
    # A prefetched batch is stale.
    91: ("matrix/test_prefetch.py::test_the_prefetched_loop_equals_the_plain_one_bit_for_bit",),
    # Evaluation without an optimizer.
    92: (
        "test_tables.py::test_evaluates_a_loaded_state_without_an_optimizer",
        "matrix/test_checkpoint.py::test_evaluation_needs_no_optimizer_rows",
    ),
    # States of tables of different widths.
    93: (
        "test_optimizer.py::test_distributed_checkpoint_resumes_tables_of_two_widths",
        "matrix/test_checkpoint.py::test_saved_on_two_by_two_ranks_and_continued_elsewhere",
    ),
    # Gradients of the weights of ids.
    94: (
        "test_tables.py::test_numeric_derivative_of_the_pooling_weights",
        "matrix/test_engines.py::test_an_engine_trains_as_whole_tables_do_or_names_what_it_cannot",
    ),
    # Weights that nobody gave.
    96: ("test_tables.py::test_weighted_and_unweighted_features_mix_in_poisoned_memory",),
    # Plans that name ranks outside their group.
    117: (
        "planning/test_placements.py::"
        "test_a_group_of_two_in_a_world_of_four_names_only_its_own_ranks",
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


def test_places_beyond_int32_are_read_and_moved(tmp_path):
    """A table behind 2^31 elements; the file has holes, so it takes no room."""
    begin = 2**31 + 6
    weights_N = torch.from_file(
        str(tmp_path / "rows"), shared=True, size=begin + 6, dtype=torch.float16
    )
    weights_N[begin:] = torch.arange(6, dtype=torch.float16)
    layout = TableLayout((TableSlot(begin, 3, 2, 0),), (FeatureSlot(0, "sum"),))
    ids_I, bags_O = torch.tensor([2, 0]), torch.tensor([0, 2])
    _, (found,) = table_lookup(weights_N, ids_I, bags_O, layout, counts=[2])
    assert found.tolist() == [[4.0, 6.0]]
    table_update(
        weights_N,
        [],
        ids_I,
        bags_O,
        torch.ones(2),
        layout,
        spec=OptimizerSpec(kind="sgd", lr=1.0),
        counts=[2],
    )
    assert weights_N[begin:].tolist() == [-1.0, 0.0, 2.0, 3.0, 3.0, 4.0]
    assert not weights_N[:8].any()
