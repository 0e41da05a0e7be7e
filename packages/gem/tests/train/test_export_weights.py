"""Dense weights in one SafeTensors file, without the data set and without the model's code."""

import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gem.data.prepare import default_folder
from gem.data.reader import open_reader
from gem.model.build import build_model
from gem.train.averages import averaged_weights
from gem.train.export_weights import export_weights
from gem.train.loop import train
from gem.train.run_folder import CHECKPOINTS
from gem.train.saved_run import saved_run
from gem_opkit.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory, data_root):
    folder = tmp_path_factory.mktemp("exported") / "run"
    train(tiny(), folder, data_root=data_root)
    return folder


@pytest.mark.parametrize("averaged", [True, False])
def test_the_file_holds_what_the_model_has(tiny, run, data_root, tmp_path, averaged):
    out = tmp_path / "weights.safetensors"
    found = export_weights(run, out, averaged=averaged)
    assert (found["steps"], found["averaged"]) == (10, averaged)
    assert found["bytes"] == out.stat().st_size
    tensors = load_file(out)
    assert len(tensors) == found["tensors"]
    with saved_run(run, command="test", display=None, data_root=data_root) as saved:
        step = saved.run.step
        weights = {n: p.detach() for n, p in step.dense.items()}
        expected = dict(step.ema) if averaged else weights
        assert not all(torch.equal(weights[n], step.ema[n]) for n in weights)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[n], expected[n]) for n in expected)
    with safe_open(out, "pt") as file:
        notes = file.metadata()
    assert (notes["recipe"], notes["step"], notes["averaged"]) == (
        "tiny",
        "10",
        str(averaged).lower(),
    )
    # They go back into a model that somebody builds.
    folder = default_folder(tiny().data, data_root)
    reader = open_reader(folder, tiny().data, batch_size=8)
    model = build_model(tiny().model, reader.schema).eval()
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert unknown == []
    assert all(name.startswith("tables.") for name in missing)
    # And with the tables it predicts what the run does.
    trained = saved.run.step.model.eval()
    model.load_state_dict(
        {n: v for n, v in trained.state_dict().items() if n in missing}, strict=False
    )
    batch = next(reader.batches("test"))
    with torch.no_grad(), averaged_weights(trained, step.ema if averaged else {}):
        assert torch.equal(model(batch), trained(batch))


def test_a_checkpoint_of_the_run_can_be_named(run, tmp_path):
    found = export_weights(run / CHECKPOINTS / "step-3", tmp_path / "w")
    assert found["steps"] == 3


def test_what_cannot_be_exported_is_refused(run, tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(ConfigError, match=r"--out must be a new file; got .*taken, which is there"):
        export_weights(run, tmp_path / "taken")
    with pytest.raises(ConfigError, match=r"RUN must be the folder of a run.*or one of its"):
        export_weights(tmp_path, tmp_path / "w")
    with pytest.raises(FileNotFoundError) as caught:
        export_weights(run, tmp_path / "nowhere" / "w")
    assert caught.value.filename == str(tmp_path / "nowhere" / "w")
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / CHECKPOINTS / "step-10" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[99] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="must hold what was written"):
        export_weights(copy, tmp_path / "w")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "taken"]
