"""What peers read is what our model reads, row by row."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gem.config import load_recipe
from gem.data.prepare import default_folder
from gem.data.reader import open_reader

BENCHMARKS = Path(__file__).parents[1] / "packages" / "gem" / "benchmarks"


def load(file: Path) -> ModuleType:
    name = f"benchmark_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


flat_inputs = load(BENCHMARKS / "flat_inputs.py")
peer_inputs = load(BENCHMARKS / "peers" / "inputs.py")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("flat")
    config = load_recipe("synthetic-debug", ["data.synthetic.rows=1200"])
    histories = (
        flat_inputs.History("impressions", "item_id", "feedback"),
        flat_inputs.History("clicks", "item_id"),
    )
    meta = flat_inputs.export_inputs(config, histories, root / "inputs", data_root=root / "data")
    assert (
        flat_inputs.export_inputs(config, histories, root / "inputs") == meta
    )  # as they lie there
    source = default_folder(config.data, root / "data")
    reader = open_reader(source, config.data, batch_size=97)
    return config, meta, root / "inputs", reader


def test_columns_are_those_of_the_reader(exported):
    config, meta, folder, reader = exported
    train = list(reader.batches("train"))
    seen = {int(i) for b in train for i in b.ids["item_id"].values}
    for stream in ("impressions", "clicks"):
        seen |= {int(i) for b in train for i in b.streams[stream].ids["item_id"].values}
    # Positions: 0 pads, 1 is unseen, then the ids of the training rows in order.
    position = {item: place + 2 for place, item in enumerate(sorted(seen))}
    for split in ("train", "valid", "test"):
        columns = dict(np.load(folder / f"{split}.npz"))
        row = 0
        for batch in reader.batches(split):
            here = slice(row, row + batch.examples)
            assert np.array_equal(columns["numbers"][here], batch.numbers_BD.numpy())
            label = np.where(batch.label_mask_BA, batch.labels_BA, np.nan)
            assert np.array_equal(columns["labels"][here], label, equal_nan=True)
            wanted = [position.get(int(item), 1) for item in batch.ids["item_id"].values]
            assert columns["ids.item_id"][here].tolist() == wanted
            for place, stream in enumerate(("impressions", "clicks")):
                offsets = columns[f"history{place}.items.offsets"]
                events = batch.streams[stream].ids["item_id"].to_list()
                for k, items in enumerate(events, start=row):
                    flat = columns[f"history{place}.items"][offsets[k] : offsets[k + 1]]
                    assert flat.tolist() == [position.get(int(i), 1) for i in items]
            row += batch.examples
        assert row == meta["rows"][split] == reader.rows(split) > 0
    assert meta["statistics"] == [s.name for s in config.data.statistics]


def test_raw_variant_lacks_the_statistics_and_a_task_its_unlabelled_rows(exported):
    _, meta, folder, _ = exported
    full = peer_inputs.read_inputs(folder, "conversion", "statistics")
    raw = peer_inputs.read_inputs(folder, "conversion", "raw")
    assert set(full.number_names) - set(raw.number_names) == set(meta["statistics"])
    for split, rows in full.splits.items():
        label = np.load(folder / f"{split}.npz")["labels"][:, meta["labels"].index("conversion")]
        assert 0 < rows.rows == np.count_nonzero(~np.isnan(label)) < meta["rows"][split]
        assert rows.numbers.shape == (rows.rows, len(full.number_names))
        for offsets, values in rows.bags.values():
            assert len(offsets) == rows.rows + 1
            assert offsets[-1] == len(values)
    train = full.splits["train"].numbers.astype(np.float64)
    assert np.abs(train.mean(axis=0)).max() < 0.1  # cut at 5 spreads, so not quite 0
    assert train.std(axis=0) == pytest.approx(np.ones(train.shape[1]), abs=0.15)


def test_bags_by_feedback_share_out_the_history(exported):
    _, _, folder, _ = exported
    inputs = peer_inputs.read_inputs(folder, "click", "statistics")
    kinds = [name for name in inputs.pooled if name.startswith("history0.")]
    assert "history1.items" in inputs.pooled
    assert len(kinds) > 1
    for rows in inputs.splits.values():
        offsets, items = rows.bags["history0.items"]
        feedback = rows.bags["history0.feedback"][1]
        for row in range(0, rows.rows, 37):
            here = slice(offsets[row], offsets[row + 1])
            for name in kinds:
                kind = int(name.removeprefix("history0.kind"))
                bag_offsets, values = rows.bags[name]
                found = values[bag_offsets[row] : bag_offsets[row + 1]]
                pairs = zip(items[here], feedback[here], strict=True)
                assert found.tolist() == [item for item, what in pairs if what == kind]


def test_padding_keeps_the_newest_events():
    offsets, values = np.array([0, 0, 2, 6]), np.array([5, 6, 7, 8, 9, 10])
    assert peer_inputs.padded((offsets, values), 3).tolist() == [[0, 0, 0], [5, 6, 0], [8, 9, 10]]
    assert peer_inputs.lengths((offsets, values), 3).tolist() == [0, 2, 3]
    nothing = np.zeros(3, np.int64), np.zeros(0, np.int64)
    assert peer_inputs.padded(nothing, 2).tolist() == [[0, 0], [0, 0]]


def test_predictions_of_other_inputs_or_seeds_are_not_taken_for_these(
    exported, tmp_path, monkeypatch
):
    _, meta, _, _ = exported
    monkeypatch.syspath_prepend(BENCHMARKS)
    bench_peers = load(BENCHMARKS / "bench_peers.py")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    files = []
    for stamp, seeds in ((meta["stamp"], [1, 2]), (meta["stamp"], [1, 2]), ("other", [1, 2])):
        (inputs / "inputs.json").write_text(json.dumps({**meta, "stamp": stamp}))
        peer = bench_peers.PEERS["din"]
        files.append(bench_peers.predictions_file(peer, inputs, "click", "raw", seeds))
    files.append(bench_peers.predictions_file(peer, inputs, "click", "raw", [1]))
    assert files[0] == files[1]
    assert len(set(files)) == 3
    assert {file.parent for file in files} == {tmp_path}
