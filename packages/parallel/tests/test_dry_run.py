"""A rank of a large job in one process: bytes and memory that are known beforehand."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gem_opkit.errors import ConfigError
from gem_parallel.contract import ParallelPlan
from gem_parallel.dense import parallelise
from gem_parallel.dry_run.fakes import FloatsInName
from gem_parallel.dry_run.groups import named_ranks
from gem_parallel.dry_run.ledger import Sent, totals
from gem_parallel.dry_run.memory import MemoryCount
from gem_parallel.dry_run.replicas import replicas_in_name
from gem_parallel.mesh import plan_mesh

WIDTH, ROWS = 64, 32
ONE = WIDTH * WIDTH * 4


def layers(count=2):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def test_axes_of_both_meshes_are_told_apart_also_where_each_is_the_world():
    plan = ParallelPlan(shard=8, table_shard=8)
    with named_ranks(3, 8) as named:
        shard = plan_mesh(plan, named.world, "dense").get_group("shard")
        table_shard = plan_mesh(plan, named.world, "sparse").get_group("table_shard")
        for group in (shard, table_shard):
            dist.all_reduce(torch.zeros(5), group=group)
        dist.all_reduce(torch.zeros(3))
        named.ledger.section = "later"
        dist.broadcast(torch.zeros(2, dtype=torch.int64), src=0)
        taken = named.ledger.take()
    assert taken == [
        Sent("shard", "all_reduce", 20, ""),
        Sent("table_shard", "all_reduce", 20, ""),
        Sent("world", "all_reduce", 12, ""),
        Sent("world", "broadcast", 16, "later"),
    ]
    assert totals(taken, lambda call: call.section == "later") == {("world", "broadcast"): 16}


def test_every_other_rank_sends_what_this_one_sends():
    with named_ranks(1, 3):
        counts = torch.tensor([1, 2, 3])
        heard = torch.zeros(3, dtype=torch.int64)
        dist.all_to_all_single(heard, counts)
        assert heard.tolist() == [2, 2, 2]  # what rank 1 sends to itself
        parts = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(parts, torch.tensor([4.0, 5.0]))
        assert [part.tolist() for part in parts] == [[4.0, 5.0]] * 3


def test_a_second_job_in_this_process_is_refused():
    with named_ranks(0, 2), pytest.raises(ConfigError, match="process group must not exist"):  # noqa: SIM117
        with named_ranks(0, 2):
            pass
    assert not dist.is_initialized()


def test_floats_are_names_and_integers_are_real():
    with FloatsInName() as mode:
        weight, ids = torch.randn(10**6, 10**6), torch.tensor([5, 3, 5])
        found = weight[ids].sum(1)
        rows, places = torch.unique(ids, return_inverse=True)
        counts = weight.new_zeros(2, dtype=torch.int64) + rows
        assert (found.shape, rows.tolist(), places.tolist()) == ((3,), [3, 5], [1, 0, 1])
        assert counts.tolist() == [3, 5]
        with pytest.raises(Exception, match="_local_scalar_dense"):
            found.tolist()
        named = mode.without_memory({"x": torch.ones(2), "i": ids})
        assert named["i"] is ids
        assert type(named["x"]).__name__ == "FakeTensor"


def test_rows_of_a_sparse_gradient_are_real():
    with FloatsInName():
        weight = nn.Parameter(torch.zeros(10, 4))
        torch.nn.functional.embedding(torch.tensor([7, 2, 7]), weight, sparse=True).sum().backward()
        assert weight.grad is not None
        assert weight.grad._indices().tolist() == [[7, 2, 7]]
        assert weight.grad._values().shape == (3, 4)
        torch.nn.functional.embedding(torch.tensor([2, 1]), weight, sparse=True).sum().backward()
        assert weight.grad._indices().tolist() == [[7, 2, 7, 2, 1]]
        merged = weight.grad.coalesce()
        assert (merged.indices().tolist(), merged.values().shape) == ([[1, 2, 7]], (3, 4))


def test_memory_of_a_step_that_was_added_up_by_hand():
    memory = MemoryCount()
    with memory.watching(), FloatsInName(memory):
        model, x = layers(), torch.randn(ROWS, WIDTH)
        assert memory.name("parameters", model.parameters()) == 2 * ONE
        memory.name("input", [x])
        memory.begin()
        memory.enter("forward")
        loss = model(x).sum()
        activation = ROWS * WIDTH * 4
        # Input, what the first layer gives, and the loss: a sum keeps nothing of what it adds up.
        assert memory.now_bytes == 2 * ONE + 2 * activation + 4
        memory.enter("backward")
        loss.backward()
        peak = memory.peak
        assert memory.now_bytes - 4 <= 4 * ONE + activation + 8
        del loss
    # At the fullest both weights have gradients, or one has and an activation's is there as well.
    assert peak.section == "backward"
    assert peak.by_kind["parameters"] == 2 * ONE
    assert 4 * ONE + activation <= peak.total_bytes <= 4 * ONE + 4 * activation + 16


def test_storage_that_is_resized_is_followed():
    memory = MemoryCount()
    with memory.watching(), FloatsInName(memory):
        whole = torch.zeros(1000)
        whole.untyped_storage().resize_(0)
        assert memory.now_bytes == 0
        whole.untyped_storage().resize_(400)
        assert memory.now_bytes == 400
        del whole
        assert memory.now_bytes == 0
    assert memory.peak.total_bytes == 4000


def step_of(plan, size, *, rank=0):
    """Bytes of one step, and memory between steps and at the fullest."""
    memory = MemoryCount()
    with (
        named_ranks(rank, size) as named,
        memory.watching(),
        replicas_in_name(),
        FloatsInName(memory),
    ):
        model = layers()
        parallel = parallelise(model, plan, named.world, units=["0", "1"])
        held = memory.name("parameters", parallel.parameters.values())
        x = torch.randn(ROWS, WIDTH)
        for _ in range(2):
            named.ledger.take()
            parallel.module(x).sum().backward()
        return totals(named.ledger.take()), held, memory.peak.total_bytes


def test_copies_reduce_every_gradient_once():
    sent, held, _ = step_of(ParallelPlan.data_parallel(4), 4)
    assert (sent, held) == ({("world", "all_reduce"): 2 * ONE}, 2 * ONE)


def test_four_thousand_ranks_give_the_bytes_of_the_closed_forms():
    began = time.perf_counter()
    plan = ParallelPlan(replicate=512, shard=8, table_shard=4096, replicate_below=0)
    sent, _, _ = step_of(plan, 4096, rank=4095)
    assert time.perf_counter() - began < 30
    part = 2 * ONE // 8
    assert sent["shard_expert", "all_gather"] in (
        part * 2,
        part * 2 - part // 2,
    )  # last unit may stay
    assert sent["shard_expert", "reduce_scatter"] == 2 * ONE
    assert sent["replicate", "all_reduce"] == part


def test_torch_shards_itself_over_ranks_in_name():
    with named_ranks(0, 4) as named, FloatsInName():
        mesh = plan_mesh(ParallelPlan(shard=4, table_shard=4), named.world, "dense")["shard"]
        model = layers(1)
        fully_shard(model, mesh=mesh)
        model(torch.randn(ROWS, WIDTH)).sum().backward()
        sent = totals(named.ledger.take())
    assert sent["shard", "all_gather"] in (ONE // 4, ONE // 2)
    assert sent["shard", "reduce_scatter"] == ONE
