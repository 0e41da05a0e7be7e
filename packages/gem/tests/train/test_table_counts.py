"""What the log says that tables were asked for, against the ids of the batches themselves."""

import json

import pytest

from gem.data.prepare import default_folder
from gem.data.reader import open_reader
from gem.train.run_log import METRICS_FILE, RunLog


@pytest.fixture(scope="module")
def asked(tiny, unbroken, data_root):
    """Step -> table -> [ids, different rows, examples without ids], over the steps so far."""
    config = tiny()
    reader = open_reader(default_folder(config.data, data_root), config.data, batch_size=32)
    sums, found = {}, {}
    for step, batch in enumerate(reader.batches("train"), start=1):
        rows = {}
        for source in reader.schema.ids:
            ids = batch.ids[source.name]
            counts = sums.setdefault(source.table, [0, 0, 0])
            counts[0] += len(ids.values)
            counts[2] += int((ids.lengths == 0).sum()) if source.multi else 0
            rows.setdefault(source.table, set()).update(ids.values.tolist())
        for stream in reader.schema.streams:
            for source in stream.ids:
                ids = batch.streams[stream.name].ids[source.name]
                sums.setdefault(source.table, [0, 0, 0])[0] += len(ids.values)
                rows.setdefault(source.table, set()).update(ids.values.tolist())
        for table, different in rows.items():
            sums[table][1] += len(different)
        found[step] = {table: list(counts) for table, counts in sums.items()}
    reader.close()
    return found


def test_rows_of_the_log_hold_the_counts_of_training(asked, unbroken):
    lines = (unbroken[0] / METRICS_FILE).read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "split" not in row]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10]
    for row in rows:
        found = {
            table: [counts["looked_up"], counts["unique"], counts["empty_bags"]]
            for table, counts in row["tables"].items()
        }
        assert found == asked[row["step"]]
        assert all(c["out_of_range"] == c["clipped"] == 0 for c in row["tables"].values())


def test_the_record_of_the_run_holds_the_last_of_them(asked, unbroken):
    tables = json.loads((unbroken[0] / "diagnostics.json").read_text())["tables"]
    # The evaluations at the end have looked up more; they are not in it.
    found = {name: facts["in_training"]["looked_up"] for name, facts in tables.items()}
    assert found == {name: counts[0] for name, counts in asked[10].items()}


def test_counts_of_tables_make_no_curves(tmp_path, monkeypatch):
    written = {}
    with RunLog(tmp_path, 0, enabled=True) as log:
        monkeypatch.setattr(log._board, "write", lambda step, numbers: written.update(numbers))
        log.write({"step": 1, "loss": 0.5, "tables": {"item": {"looked_up": 3}}})
    assert written == {"loss": 0.5}
    assert json.loads((tmp_path / METRICS_FILE).read_text())["tables"]["item"]["looked_up"] == 3
