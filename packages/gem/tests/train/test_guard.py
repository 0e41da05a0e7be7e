"""Steps that must not move the weights: nothing moves, the batch is kept, the run ends or not."""

import dataclasses
import io
import math
import shutil

import pytest
import torch
from rich.console import Console

from gem.data.prepare import default_folder, prepare
from gem.data.reader import open_reader
from gem.model.build import build_model
from gem.train import loop
from gem.train.checkpoint import latest_complete
from gem.train.clock import StepClock
from gem.train.guard import MOST_FILES, Fault, Guard, is_finite, write_batch
from gem.train.log_rows import stopped_by
from gem.train.loop import train
from gem.train.loop_state import LoopState
from gem.train.progress import Display
from gem.train.run_folder import CHECKPOINTS
from gem.train.spec import GuardSpec
from gem.train.step import TrainStep
from gem_opkit.errors import DataError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

SKIP = GuardSpec(nonfinite="skip")


def judge(guard: Guard, loss: float, *, finite: bool = True) -> Fault | None:
    return guard.judge(torch.tensor(loss), torch.tensor(finite))


def test_what_is_not_finite_is_named_and_counted():
    guard = Guard(SKIP, World(), state := LoopState())
    assert guard.decides
    assert judge(guard, 0.7) is None
    assert judge(guard, math.nan).got == "nan"
    assert judge(guard, math.inf).name == "loss"
    fault = judge(guard, 0.7, finite=False)
    assert (fault.name, fault.stops) == ("gradients", False)
    assert (state.skipped_steps, state.skipped_in_a_row) == (3, 3)
    assert judge(guard, 0.7) is None
    assert (state.skipped_steps, state.skipped_in_a_row) == (3, 0)
    assert judge(Guard(GuardSpec(), World(), LoopState()), math.nan).stops


def test_too_many_in_a_row_end_the_run():
    guard = Guard(GuardSpec(nonfinite="skip", most_skipped_in_a_row=2), World(), LoopState())
    assert [judge(guard, math.nan).stops for _ in range(3)] == [False, False, True]
    ended = judge(guard, math.nan)  # and stays ended
    assert "after 2 skipped steps in a row" in ended.got
    assert "--set train.guard.most_skipped_in_a_row=4" in str(stopped_by(ended, "in step 9"))


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_a_jump_of_the_loss_is_a_spike(policy):
    spec = GuardSpec(spike_factor=3.0, spike=policy, spike_after_steps=4)
    guard = Guard(spec, World(), state := LoopState())
    assert judge(guard, 50.0) is None  # too early to tell
    for _ in range(400):
        assert judge(guard, 1.0) is None
    assert state.loss_mean == pytest.approx(1.0, abs=0.05)
    assert judge(guard, 2.9) is None
    mean = state.loss_mean
    fault = judge(guard, 3.2)
    assert fault.stops == (policy == "stop")
    assert "be at most 3 times the mean of the newest steps" in fault.must
    assert "--set train.guard.spike=skip" in str(stopped_by(fault, "in step 9"))
    assert state.loss_mean == mean  # what is left out is not learned from


def judge_on_rank(world: World):
    guard = Guard(SKIP, world, LoopState())
    own = torch.tensor(math.nan if world.rank == 1 else 0.5)
    first = guard.judge(own, torch.isfinite(own))
    second = guard.judge(torch.tensor(0.5), torch.tensor(world.rank == 1))
    return first, second, guard.judge(torch.tensor(0.5), torch.tensor(True)), guard.state


def test_all_ranks_judge_alike():
    ranks = run_ranks(judge_on_rank, 2)
    assert ranks[0] == ranks[1]
    assert [f and f.name for f in ranks[0][:3]] == ["loss", "gradients", None]


@pytest.mark.parametrize("where", [None, "dense", "sparse", "loss", "square"])
def test_every_gradient_is_looked_at(where):
    dense, table = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4, 2))
    dense.grad = torch.tensor([1.0, 3e17, -3e17])  # large, and finite
    values = torch.ones(2, 2)
    bad = torch.tensor(math.nan)
    if where == "dense":
        dense.grad[1] = -math.inf
    if where == "square":  # itself a number, of which an optimizer would make infinity
        dense.grad[1] = -3e19
        assert torch.isfinite(dense.grad).all()
    if where == "sparse":
        values[1, 0] = bad
    table.grad = torch.sparse_coo_tensor(torch.tensor([[0, 3]]), values, (4, 2))
    loss = bad if where == "loss" else torch.tensor(0.5)
    unused = torch.nn.Parameter(torch.ones(1))
    assert bool(is_finite(loss, [dense, table, unused])) == (where is None)


@pytest.fixture(scope="module")
def data(tiny, data_root):
    config = tiny()
    folder = default_folder(config.data, data_root)
    prepare("synthetic", folder, options=config.data.synthetic)
    return folder


def spoiled(batch):
    numbers_BD = batch.numbers_BD.clone()
    numbers_BD[3] = math.nan
    return dataclasses.replace(batch, numbers_BD=numbers_BD)


def bits(step: TrainStep):
    tensors = [*step.model.state_dict().values(), *step.ema.values()]
    for optimizer in step.optimizers.values():
        for entry in optimizer.state.values():
            tensors += [v for v in entry.values() if isinstance(v, torch.Tensor)]
    return [t.clone() for t in tensors]


def test_a_step_that_is_not_taken_moves_nothing(tiny, data):
    config = tiny("train.guard.nonfinite=skip")
    reader = open_reader(data, config.data, batch_size=32)
    model = build_model(config.model, reader.schema)
    state = LoopState()
    step = TrainStep(
        config,
        model,
        reader.schema,
        World(),
        total_steps=10,
        clock=StepClock(torch.device("cpu")),
        guard=Guard(config.train.guard, World(), state),
    )
    first, second, third = list(reader.batches("train"))[:3]
    assert step(first, 0).fault is None
    before = bits(step)
    scored = step(spoiled(second), 1)
    assert scored.fault.name == "loss"
    assert all(torch.equal(a, b) for a, b in zip(bits(step), before, strict=True))
    assert torch.isfinite(scored.p_BA).all(dim=1).sum() == 31
    assert step(third, 2).fault is None
    assert not all(torch.equal(a, b) for a, b in zip(bits(step), before, strict=True))


def test_the_batch_of_a_fault_can_be_looked_at(tiny, data, tmp_path):
    batch = next(open_reader(data, tiny().data, batch_size=32).batches("train"))
    fault = Fault("loss", "be finite", "nan", stops=False)
    path = write_batch(tmp_path, spoiled(batch), step=7, rank=0, fault=fault)
    found = torch.load(path, weights_only=True)
    assert (found["step"], found["fault"]) == (7, "loss must be finite; got nan")
    assert found["row_B"].tolist() == list(range(32))
    assert found["numbers_BD"].isnan().any(dim=1).nonzero().tolist() == [[3]]
    assert torch.equal(found["labels_BA"], batch.labels_BA)
    clicks = found["streams"]["clicks"]
    assert clicks["lengths"].tolist() == batch.streams["clicks"].numbers.lengths.tolist()
    assert clicks["gap_seconds"].shape == (int(clicks["lengths"].sum()),)
    for step in range(8, 40):
        write_batch(tmp_path, batch, step=step, rank=0, fault=fault)
    assert len(list(path.parent.iterdir())) == MOST_FILES


def test_a_disk_that_takes_no_batch_does_not_end_the_run(tiny, data_root, tmp_path, monkeypatch):
    spoil(monkeypatch, 5)
    save = torch.save

    def full(content, path):
        if "faulty" in str(path):
            raise OSError(28, "No space left on device")
        save(content, path)

    monkeypatch.setattr(torch, "save", full)
    console = Console(file=(printed := io.StringIO()), width=10_000)
    config = tiny("train.guard.nonfinite=skip")
    summary = train(config, tmp_path, display=Display(console), data_root=data_root)
    assert (summary["steps"], summary["training"]["skipped_steps"]) == (10, 1)
    assert (
        "skipped step 5: loss must be finite; got nan; its batch (rows 128 to 159 of the log) "
        in (text := printed.getvalue())
    )
    assert "cannot be written: [Errno 28] No space left" in text
    assert list((tmp_path / "faulty-batches").iterdir()) == []


def spoil(monkeypatch, *steps: int):
    """Put a NaN into the batches of some steps, counted from 1."""
    take = TrainStep.__call__

    def with_nan(self, batch, step):
        return take(self, spoiled(batch) if step + 1 in steps else batch, step)

    monkeypatch.setattr(TrainStep, "__call__", with_nan)


def outcome(folder, summary):
    newest = latest_complete(folder / CHECKPOINTS)
    tensors = sorted(newest.glob("*.distcp"))[0].read_bytes()
    return {k: summary[k] for k in ("training", "progressive", "valid", "test")}, tensors


def test_a_run_that_stopped_on_a_bad_batch_goes_on_without_it(
    tiny, data, data_root, tmp_path, monkeypatch
):
    """And is then, to the last bit, the run that left such steps out from the first."""
    spoil(monkeypatch, 5)
    skip = tiny("train.guard.nonfinite=skip")
    whole = train(skip, tmp_path / "whole", data_root=data_root)
    assert whole["training"]["skipped_steps"] == 1
    assert whole["training"]["skipped_examples"] == 32
    assert whole["examples"] == 320
    assert whole["progressive"]["click"]["examples"] == 319  # one prediction was no number
    with pytest.raises(DataError) as caught:
        train(tiny(), tmp_path / "part", data_root=data_root)
    message = str(caught.value)
    assert (
        "gem train: loss must be finite; got nan in step 5; its batch (rows 128 to 159" in message
    )
    assert "step-5-rank-0.pt; lower train.dense.lr" in message
    assert "--resume --set train.guard.nonfinite=skip" in message
    part = tmp_path / "part"
    assert latest_complete(part / CHECKPOINTS).name == "step-4"
    assert (part / "faulty-batches" / "step-5-rank-0.pt").exists()
    mended = train(skip, part, resume=True, data_root=data_root)
    assert outcome(part, mended) == outcome(tmp_path / "whole", whole)


@pytest.mark.parametrize("next_look", ["train.log_every_steps=4", "train.interim.every_steps=1"])
def test_a_fault_that_nobody_waited_for_is_told_with_its_batch(
    tiny, data_root, tmp_path, monkeypatch, next_look
):
    """As on GPUs, where the weights have moved by then."""
    spoil(monkeypatch, 5)
    late = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(Guard, "decides", late, raising=False)
    with pytest.raises(
        DataError, match=r"loss must be finite; got nan in step 5; its batch \(rows"
    ):
        train(tiny("train.log_every_steps=4", next_look), tmp_path, data_root=data_root)
    assert latest_complete(tmp_path / CHECKPOINTS).name == "step-3"
    assert [p.name for p in (tmp_path / "faulty-batches").iterdir()] == ["step-5-rank-0.pt"]


@pytest.mark.parametrize("what", ["weights", "optimizers"])
def test_what_is_no_number_is_never_saved(tiny, data_root, tmp_path, monkeypatch, what):
    """Whatever made it so: a checkpoint of it would be worth nothing."""
    take = loop._one_step

    def broken(run, batch, *rest):
        take(run, batch, *rest)
        if run.state.step == 6:
            with torch.no_grad():
                weight = next(iter(run.step.dense.values()))
                mean_square = run.step.optimizers["dense"].state[weight]["exp_avg_sq"]
                (weight if what == "weights" else mean_square).view(-1)[0] = math.inf

    monkeypatch.setattr(loop, "_one_step", broken)
    with pytest.raises(
        DataError, match=rf"{what} must be finite, to be saved; got .* after step 6"
    ):
        train(tiny(), tmp_path, data_root=data_root)
    assert latest_complete(tmp_path / CHECKPOINTS).name == "step-3"


def test_the_count_goes_on_after_a_resume(tiny, data_root, tmp_path, monkeypatch):
    spoil(monkeypatch, 2, 8)
    config = tiny("train.guard.nonfinite=skip", "train.guard.spike_factor=9.0")
    whole = train(config, tmp_path / "whole", data_root=data_root)
    assert whole["training"]["skipped_steps"] == 2
    part = tmp_path / "part"
    shutil.copytree(tmp_path / "whole", part)
    for step in (9, 10):
        shutil.rmtree(part / CHECKPOINTS / f"step-{step}")
    again = train(config, part, resume=True, data_root=data_root)
    assert outcome(part, again) == outcome(tmp_path / "whole", whole)
