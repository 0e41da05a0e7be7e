"""``python -m gem_embeddings.planning``: a file in, one table of text or figures out."""

import json
from pathlib import Path

import pytest

from gem_embeddings.planning.__main__ import main

LARGE = Path(__file__).parents[2] / "benchmarks" / "large_tables.toml"
SMALL = """
[planning]
batch_per_rank = 8
memory_gib = 1
[planning.topology]
ranks_per_host = 4
host_tier = { name = "nvlink", gbytes_per_s = 450, latency_us = 5 }
[[planning.loads]]
feature_name = "liked"
ids_per_example = 20
[[tables]]
name = "item"
embedding_dim = 64
num_embeddings = 1000000
feature_names = ["liked"]
[[families]]
name = "context"
tables = 3
least_rows = 10
most_rows = 1000
embedding_dim = 16
"""


@pytest.fixture
def small(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return file


def test_large_example_is_planned_as_one_table(capsys):
    assert main([str(LARGE), "--gpus", "256", "--most-tables", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "table"
    assert "why this cut" in lines[0]
    assert len([line for line in lines if line.startswith(("entity_", "history_"))]) == 5
    assert any(line.startswith("... and 487 smaller tables") for line in lines)
    for word in ("ranks ", "tables ", "held ", "gathered ", "balance ", "step "):
        assert any(line.startswith(word) for line in lines), word


def test_figures_are_json_and_agree_with_the_tables(small, capsys):
    assert main([str(small), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["tables"]) == (4, 4)
    assert sum(found["kinds"].values()) == 4
    # Rows of 10, 100 and 1000, and the large table, with an accumulator a row each.
    rows = (10 + 100 + 1000) * (16 * 4 + 4) + 1_000_000 * (64 * 4 + 4)
    replicated = found["kinds"].get("replicated", 0)
    held = found["held_bytes_mean"] * found["table_shard"]
    if found["fully_sharded"]:
        held *= found["table_replicate"]
    assert replicated or held == pytest.approx(rows, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (("memory_gib = 1\n", "memory_gib = 0.01\n"), [], "table item must fit"),
        (("num_embeddings", "num_embedings"), [], "num_embedings"),
        (("[planning]", "[planing]"), [], "planing"),
        (("batch_per_rank = 8", "batch_per_rank = "), [], "file must be readable TOML"),
        (("1000000", "1" + 5000 * "0"), [], "file must be readable TOML"),
        (("8", 5000 * "["), [], "file must be readable TOML"),
        (("1000000", "1" + 400 * "0"), [], "less than 9223372036854775808"),
        (("= 64", "= 9000000000"), [], "must fit beside the others"),
        (("= 8", "= 1" + 400 * "0"), [], "less than 9223372036854775808"),
        (("most_rows = 1000", "most_rows = 1" + 400 * "0"), [], "less than 9223372036854775808"),
        (("liked", "context_0"), [], "planning.loads must leave out the features of families"),
        (("", ""), ["--gpus", "6"], "--gpus must fill whole hosts of 4"),
        (("", ""), ["--gpus", "8"], "zone_tier must be given"),
    ],
)
def test_a_wrong_file_is_one_line_on_stderr(small, capsys, change, options, message):
    small.write_text(SMALL.replace(*change, 1) if change[0] else SMALL)
    assert main([str(small), *options]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert message in told.err


def test_a_missing_file_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "none.toml")]) == 1
    assert "file must be readable TOML" in capsys.readouterr().err


def test_a_negative_number_of_tables_is_a_wrong_use(small, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(small), "--most-tables", "-1"])
    assert "--most-tables must be at least 0; got -1" in capsys.readouterr().err
