"""The time that a rank spends on its own: units of a model, without waiting for other ranks."""

import math

import pytest
import torch
from torch import nn

from gem.data.batch import StepWork
from gem.model.interaction import ExpertMixture
from gem.train import rank_times
from gem.train.rank_times import OwnTime, RankRows, StepWorks
from gem.train.straggler_spec import StragglerSpec
from gem_parallel.launch import World


class Takes(nn.Module):
    """Takes some time of a clock that the test turns, then runs its child."""

    def __init__(self, clock, seconds, child=None):
        nn.Module.__init__(self)  # a mixture wants sizes
        self.clock, self.seconds, self.child = clock, seconds, child
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self):
        self.clock[0] += self.seconds
        if self.child is not None:
            self.child()
        self.clock[0] += self.seconds


class Mixture(Takes, ExpertMixture):
    def __init__(self, clock, seconds):
        Takes.__init__(self, clock, seconds)


class Model(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.tables = Takes(clock, 1000.0)
        self.features = Takes(clock, 1.0)
        self.layers = nn.ModuleList([Takes(clock, 2.0, Mixture(clock, 100.0)), Takes(clock, 4.0)])

    def forward(self):
        for part in (self.tables, self.features, *self.layers):
            part()


def test_units_count_and_what_may_wait_does_not(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(rank_times.time, "perf_counter", lambda: clock[0])
    model = Model(clock)
    own = OwnTime(model, torch.device("cpu"))
    model()
    model()
    model.eval()
    model()  # an evaluation is no training
    assert own.take_ms() == pytest.approx(2 * 1e3 * 2 * (1.0 + 2.0 + 4.0))
    assert own.take_ms() == 0.0


def test_means_of_what_dealing_says():
    works = StepWorks()
    assert [math.isnan(x) for x in works.means()] == [True] * 4
    for before, moved in ((1.5, 0.5), (1.1, 0.25)):
        works.add(batch_with(StepWork(before, 1.0, 1.25, 1.0, moved)), 7)
    assert works.means() == pytest.approx([1.3, 1.25, 1.0, 0.375])
    assert works.flops == [7, 7]
    works.add(batch_with(None), 8)  # of a step that nobody dealt
    works.clear()
    assert works.flops == []
    works.add(batch_with(StepWork(None, None, 1.25, 1.0, 0.0)), 7)
    assert math.isnan(works.means()[0])


def batch_with(work):
    class Batch:
        pass

    batch = Batch()
    batch.work = work
    return batch


def test_one_rank_has_nothing_to_compare():
    model = Model([0.0])
    rows = RankRows(model, World(), StragglerSpec())
    works = StepWorks()
    works.add(batch_with(None), 3)
    assert rows.row(works, 1.0, 2.0) == {}
    assert works.flops == []
    works.add(batch_with(StepWork(None, None, 1.5, 1.25, 0.0)), 3)
    found = rows.row(works, 1.0, 2.0)
    assert found == {"balance": {"parts_before": 1.5, "parts": 1.25}}
    assert not any(unit._forward_hooks for unit in model.modules())


def test_step_work_travels_as_numbers():
    for work in (StepWork(1.5, 1.0, 1.25, 1.0, 0.5), StepWork(None, None, 1.25, 1.0, 0.0)):
        assert StepWork.from_array(work.to_array()) == work


@pytest.mark.gpu
def test_on_a_gpu_it_is_device_time_and_nothing_waits():
    device = torch.device("cuda")

    class Sleeps(nn.Linear):
        def forward(self, x_BD):
            torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
            return super().forward(x_BD)

    model = nn.Sequential(Sleeps(4, 4), Sleeps(4, 4)).to(device)
    x_BD = torch.ones(2, 4, device=device)
    model(x_BD)
    own = OwnTime(model, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin.record()
        model(x_BD)
        end.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not end.query()  # the host has not waited
    taken = own.take_ms()
    end.synchronize()
    assert taken == pytest.approx(begin.elapsed_time(end), rel=0.1)
    assert taken > 5.0
