"""Inputs that broke other systems, and where each is tested.

Numbers are those of the list of public bug reports that this project keeps. `STANDS_IN` names the
tests of each row that concerns the trainer, `NOT_BUILT` the rows that need what is not there yet.
Below follow the tests that belong nowhere else.
"""

import ast
import json
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bad_inputs import RESUME, TRAIN, Forked, make_world, run

from gem.data.prepare import default_folder, prepare
from gem.data.reader import open_reader
from gem.train.checkpoint import latest_complete

STANDS_IN: dict[int, tuple[str, ...]] = {
    # The model does not learn.
    43: (
        "model/test_gem.py::test_overfits_a_hundred_users",
        "train/test_loop.py::test_a_hundred_users_can_be_learned_by_heart",
    ),
    # Figures from other rows than the published ones.
    44: (
        "data/test_movielens.py::test_rows_labels_and_histories_are_those_of_the_protocol",
        "data/test_kuairand.py::test_rows_labels_and_histories_are_those_of_the_protocol",
    ),
    # The gradient's norm depends on the number of ranks: clipping would show it.
    73: (
        "train/test_step.py::test_uneven_and_empty_ranks_train_like_one",
        "train/test_plans.py::test_a_plan_learns_what_one_process_learns",
    ),
    75: (
        "train/test_step.py::test_uneven_and_empty_ranks_train_like_one",
        "train/test_plans.py::test_a_plan_learns_what_one_process_learns",
    ),
    # A checkpoint with the experts of one rank.
    77: (
        "train/test_sharded_runs.py::test_a_run_goes_on_under_other_plans_and_on_one_rank",
        "train/test_sharded_runs.py::test_what_four_ranks_have_written_is_read_by_one_process",
    ),
    # Loading on another number of ranks.
    78: (
        "train/test_checkpoint.py::test_two_ranks_save_and_other_numbers_of_ranks_load",
        "test_cli.py::test_two_ranks_continue_one_reach_what_it_reaches_and_one_continues_them",
    ),
    # The learning rate after a resume.
    80: ("test_edge_cases.py::test_the_rate_goes_on_at_the_exact_next_value",),
    # Half-written checkpoints.
    81: (
        "train/test_checkpoint.py::test_a_damaged_checkpoint_is_passed_over",
        "train/test_checkpoint.py::test_a_save_that_dies_leaves_the_previous_checkpoint",
        "train/test_checkpoint.py::test_a_flipped_bit_that_keeps_the_size_is_named",
        "train/test_resume_after_damage.py::test_the_one_before_it_is_taken",
        "test_cli.py::test_killed_and_resumed_equals_unbroken",
    ),
    # Ranks with fewer batches, or none.
    90: (
        "train/test_step.py::test_uneven_and_empty_ranks_train_like_one",
        "test_edge_cases.py::test_every_rank_has_as_many_batches_also_with_too_few_rows",
    ),
    # A prefetched batch is stale.
    91: ("test_edge_cases.py::test_reading_ahead_changes_nothing",),
    # Rows lost or read twice when ranks resume.
    99: (
        "data/test_reader.py::test_every_row_once_when_the_number_of_ranks_changes_on_resume",
        "data/test_reader.py::test_resume_gives_exactly_the_batches_from_there_on",
        "data/test_workers.py::test_every_row_once_from_two_ranks_of_two_workers_to_one_of_three",
    ),
    100: (
        "train/test_loop.py::test_a_run_stopped_between_checkpoints_continues_bit_for_bit",
        "data/test_workers.py::test_batches_equal_those_without_workers",
    ),
    # A rank dies between two others' collectives.
    102: ("test_edge_cases.py::test_a_killed_rank_ends_the_job_and_the_run_goes_on",),
    # MFU.
    103: ("model/test_flops.py::test_wide_window_counts_pairs_not_squares",),
    105: (
        "train/test_mfu.py::test_an_unknown_device_has_no_mfu_but_flops",
        "train/test_mfu.py::test_more_than_the_peak_is_an_error",
    ),
    # AUC.
    106: (
        "train/test_auc.py::test_one_class_and_no_examples_have_no_auc",
        "train/test_auc.py::test_more_pairs_than_an_int64_holds",
    ),
    107: ("train/test_auc.py::test_memory_stays_bounded",),
    108: ("train/test_auc.py::test_perfect_inverted_constant_and_tied",),
    # Parquet: no rows, a last batch that is not full, nulls.
    110: (
        "data/test_dataset.py::test_file_without_rows_between_others",
        "data/test_dataset.py::test_last_row_group_may_be_partial",
        "data/test_reader.py::test_data_set_without_examples_or_events",
        "test_fuzz.py::test_any_column",
        "test_fuzz.py::test_any_bytes_of_a_parquet_file",
    ),
    # Missing values.
    112: (
        "data/test_dataset.py::test_nulls_become_the_declared_fill",
        "data/test_dataset.py::test_missing_list_is_one_fill_and_an_empty_one_is_none",
        "test_bad_input_processes.py::test_what_is_normal_trains",
        "data/test_adapters.py::test_criteo_line_with_empty_cells",
    ),
    # Versions that do not fit each other.
    114: ("test_doctor.py::test_torchrec_and_fbgemm_are_judged_together",),
}
NOT_BUILT = {
    62: "packed tokens are not sharded, so no length has to divide by anything",
}


def names_of_tests(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", STANDS_IN)
def test_the_tests_of_a_row_are_there(row):
    for place in STANDS_IN[row]:
        file, _, name = place.partition("::")
        assert name in names_of_tests(Path(__file__).parent / file), place
    assert row not in NOT_BUILT


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


@pytest.fixture
def world(sound, tmp_path, monkeypatch):
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rates():
    """Learning rate of every step, as the run logged it."""
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["lr"] for row in rows if "lr" in row}


def test_the_rate_goes_on_at_the_exact_next_value(world):
    text = Path("recipe.toml").read_text()
    schedule = 'log_every_steps = 1\n[train.schedule]\nwarmup_steps = 2\ndecay = "cosine"\n'
    Path("recipe.toml").write_text(text + schedule)
    shutil.rmtree("run")
    train = (*TRAIN[:-1], "run")
    assert run(world, train)[0] == 0
    unbroken = rates()
    assert len(set(unbroken.values())) == len(unbroken) == 4
    shutil.rmtree("run/checkpoints/step-4")
    code, out, err = run(world, RESUME)
    assert code == 0, err
    assert "continue from run/checkpoints/step-2" in out
    assert rates() == unbroken


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_has_as_many_batches_also_with_too_few_rows(tiny, data_root, world_size):
    """Three batches: two are full, the last has one row, which one rank gets."""
    config = tiny("data.max_rows=9")
    folder = default_folder(config.data, data_root)
    prepare("synthetic", folder, options=config.data.synthetic)
    rows = []
    for rank in range(world_size):
        reader = open_reader(folder, config.data, batch_size=4, rank=rank, world_size=world_size)
        batches = list(reader.batches("train"))
        assert len(batches) == reader.steps("train") == 3
        rows.append([batch.row_B.tolist() for batch in batches])
    assert [] in [batches[-1] for batches in rows]
    for step in range(3):
        together = [row for batches in rows for row in batches[step]]
        assert together == list(range(4 * step, min(4 * step + 4, 9)))


def test_reading_ahead_changes_nothing(world):
    results = []
    for depth in (0, 1, 8):
        words = ("train", "recipe.toml", "--out", f"ahead-{depth}", "--json")
        code, out, err = run(world, (*words, "--set", f"train.prefetch_batches={depth}"))
        assert code == 0, err
        results.append({key: json.loads(out)[key] for key in ("progressive", "valid", "test")})
    assert results[0] == results[1] == results[2]


def test_a_killed_rank_ends_the_job_and_the_run_goes_on(world):
    """The other rank waits in a collective: it must not wait for ever, nor lose what is written."""
    settings = ("--json", "--set", "train.passes=6")
    words = (*TRAIN[:-1], "ranks", *settings)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [Forked(world, words, {**shared, "RANK": str(rank)}).start() for rank in (0, 1)]
    deadline = time.monotonic() + 60
    while latest_complete(world / "ranks" / "checkpoints") is None:
        assert time.monotonic() < deadline
        assert ranks[0].process.is_alive(), ranks[0].outcome()
        time.sleep(0.01)
    ranks[1].process.kill()
    code, _, err = ranks[0].outcome()
    assert code == 2, err
    assert "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: gem train: every rank must go on to the end; got the end of")
    assert ranks[1].outcome()[0] == -signal.SIGKILL
    assert not Path("ranks/summary.json").exists()
    code, out, err = run(world, (*words, "--resume"))
    assert code == 0, err
    assert re.search(r"continue from ranks/checkpoints/step-\d+: step \d+ of 24", err)
    code, unbroken, err = run(world, (*TRAIN[:-1], "whole", *settings))
    assert code == 0, err
    mended, whole = json.loads(out), json.loads(unbroken)
    assert (mended["steps"], mended["examples"]) == (whole["steps"], whole["examples"])
    for split in ("progressive", "test"):
        for task, found in whole[split].items():
            assert mended[split][task]["examples"] == found["examples"]
            assert mended[split][task]["ne"] == pytest.approx(found["ne"], rel=1e-4)
