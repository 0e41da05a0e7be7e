"""Gathers by copies between ranks: the same bits as NCCL's, buffers lent and lent again, refusals.

On a CPU the ranks' buffers are files that all of them map, so that memory of other ranks is really
read. GPUs of one host do the same through torch's symmetric memory (marker gpu2).
"""

import gc
import logging

import pytest
import torch
import torch.distributed as dist
from small_model import loss_of, make_batch, nccl_world, optimizer_of, own_rows, plan_of, spread

from gem_opkit.errors import ShapeError, UnsupportedError
from gem_parallel.copy_engine.buffers import BufferPool
from gem_parallel.copy_engine.choose import GatherChoice
from gem_parallel.copy_engine.gather import CopyEngineGather
from gem_parallel.copy_engine.reach import Measured, break_even, measure, why_not
from gem_parallel.copy_engine.slices import SliceGathers
from gem_parallel.copy_engine.units import gather_by_copy_engines
from gem_parallel.testing import MappedBuffer, run_ranks

STEPS = 2
# Bytes a rank: of the small model some units are below, some above.
SOME = 40


def train(world, plan, folder):
    """Losses and parameters of some steps; how many gathers were copies, and of which buffers."""
    dense, table = spread(world, plan)
    found = {}
    if folder is not None:
        found = gather_by_copy_engines(
            dense.module,
            world.device,
            way="copy_engine",
            at_least_bytes=SOME,
            make=None if world.device.type == "cuda" else lambda g, n: MappedBuffer(folder, g, n),
        )
        assert found
    optimizer = optimizer_of(dense, table)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(dense.module, own_rows(make_batch(step), step, world), world)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    pools = {id(g.pool): g.pool for g in found.values()}
    state = {name: value.cpu() for name, value in dense.full_state().items()}
    return losses, state, [len(pool._slots) for pool in pools.values()]


def train_both(world, plans, folder):
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    return [(train(world, plan, None), train(world, plan, folder)) for plan in plans]


def train_both_on_gpus(world, store, plans):
    world = nccl_world(world, store)
    return [(train(world, plan, None), train(world, plan, "on GPUs")) for plan in plans]


def same_bits(by_rank):
    for pairs in by_rank:
        for (losses, state, _), (copied_losses, copied_state, slots) in pairs:
            assert losses == copied_losses
            assert state.keys() == copied_state.keys()
            for name, value in state.items():
                assert torch.equal(value, copied_state[name]), name
            # A unit's parameters are read while the next unit's are fetched.
            assert slots
            assert all(1 <= count <= 3 for count in slots), slots


def test_training_by_copies_has_the_bits_of_training_by_collectives(tmp_path):
    plans = [plan_of(1, 2, 1), plan_of(1, 1, 2)]
    same_bits(run_ranks(train_both, 2, plans, str(tmp_path)))


@pytest.mark.gpu2
def test_two_gpus_train_by_copies_with_the_bits_of_nccl(tmp_path):
    plans = [plan_of(1, 2, 1)]
    same_bits(run_ranks(train_both_on_gpus, 2, tmp_path / "store", plans))


def gather_some(world, folder):
    group = dist.group.WORLD
    pool = BufferPool(lambda n: MappedBuffer(folder, group, n))
    gathers = CopyEngineGather(group, pool, 200)
    found = []
    for elements in (1, 49, 50, 1000, 0):
        own = torch.arange(elements, dtype=torch.float32) + 100.0 * world.rank
        for _ in range(2):
            joined = gathers.gather(own)
            found.append((joined.clone(), pool.buffer_of(joined) is not None))
            del joined
    try:
        gathers.gather(torch.zeros(60, 2).T)
    except ShapeError as refused:
        found.append(str(refused))
    # Refused by name where ranks cannot read each other's memory, and told where they may choose.
    found.append(why_not(group, torch.device("cpu")))
    return found, len(pool._slots)


def test_parts_lie_in_rank_order_and_small_ones_go_another_way(tmp_path):
    for found, slots in run_ranks(gather_some, 2, str(tmp_path)):
        *gathered, refused, reason = found
        for place, (joined, copied) in enumerate(gathered):
            elements = (1, 49, 50, 1000, 0)[place // 2]
            each = torch.arange(elements, dtype=torch.float32)
            assert torch.equal(joined, torch.cat([each, each + 100.0]))
            assert copied == (elements * 4 >= 200)
        # The second size did not fit into the first buffer; each is lent again.
        assert slots == 2
        assert "own must be contiguous; got (1, 2)" in refused
        assert reason == "the ranks compute on cpu, which has no copy engines"


def gather_slices(world, folder):
    """Slices of several sizes, gathered again after each rank has changed its own."""
    group, gpu = dist.group.WORLD, world.device.type == "cuda"
    make = None if gpu else lambda g, n: MappedBuffer(folder, g, n)
    choice = GatherChoice("copy_engine", at_least_bytes=200, make=make)
    gathers = SliceGathers(group, world.device, choice)
    found = []
    for elements in (49, 50, 1000, 0):
        slice_ = gathers.slice(elements, torch.float32)
        if slice_ is None:
            found.append(None)
            continue
        whole = torch.zeros(elements * world.size, device=world.device)
        for turn in range(3):
            slice_.own.copy_(torch.arange(elements) + 100.0 * world.rank + turn)
            ended = slice_.gather(whole)
            ended.wait()
            slice_.own.fill_(-1.0)  # nobody reads it any more
            found.append(whole.clone().cpu())
        try:
            slice_.gather(whole[1:])
        except ShapeError as refused:
            found.append(str(refused))
    return found


def slices_are_right(by_rank):
    for small, *large, none in by_rank:
        assert small is None
        assert none is None
        for place, elements in enumerate((50, 1000)):
            *wholes, refused = large[4 * place : 4 * place + 4]
            each = torch.arange(elements, dtype=torch.float32)
            for turn, whole in enumerate(wholes):
                expected = [each + 100.0 * rank + turn for rank in range(len(by_rank))]
                assert torch.equal(whole, torch.cat(expected))
            assert f"whole must hold {len(by_rank)} slices of {elements} x torch.float32" in refused


@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_are_gathered_where_they_lie_and_may_be_written_afterwards(ranks, tmp_path):
    slices_are_right(run_ranks(gather_slices, ranks, str(tmp_path)))


def gather_slices_on_gpus(world, store):
    return gather_slices(nccl_world(world, store), None)


@pytest.mark.gpu2
def test_two_gpus_gather_slices_where_they_lie(tmp_path):
    slices_are_right(run_ranks(gather_slices_on_gpus, 2, tmp_path / "store"))


def refuse_slices(world):
    told = []
    log = logging.getLogger("gem_parallel.copy_engine.choose")
    log.addHandler(Listener(told))
    log.setLevel(logging.INFO)
    named = ("recipe", "parallel.gathers")
    for way in ("nccl", "measured", "copy_engine"):
        try:
            gathers = SliceGathers(
                dist.group.WORLD, world.device, GatherChoice(way, named=named, what="tables")
            )
            told.append(str(gathers.slice(2**24, torch.float32)))
        except UnsupportedError as refused:
            told.append(str(refused))
    return told


def test_slices_stay_with_collectives_where_no_copy_engine_is():
    for told in run_ranks(refuse_slices, 2):
        assert told == [
            "None",
            "tables are gathered by NCCL: the ranks compute on cpu, which has no copy engines",
            "None",
            'recipe: parallel.gathers must be "nccl" or "measured" here; got "copy_engine"; the '
            "ranks compute on cpu, which has no copy engines; take "
            '"measured", which uses NCCL where it has to',
        ]


class PlainBuffer:
    def __init__(self, bytes_):
        self.own = torch.zeros(bytes_, dtype=torch.uint8)


def test_a_buffer_is_lent_again_once_its_tensor_is_gone():
    pool = BufferPool(PlainBuffer)
    pool.expect(64)
    first = pool.lend(4, torch.float32)
    second = pool.lend(2, torch.float64)
    assert first.data_ptr() != second.data_ptr()
    assert pool.held_bytes == 128  # both as large as the largest that was announced
    place = first.data_ptr()
    assert pool.buffer_of(first).own.data_ptr() == place
    view = first.view(2, 2)
    del first
    assert pool.buffer_of(view) is not None  # a view holds it, too
    del view
    gc.collect()
    third = pool.lend(16, torch.float32)
    assert third.data_ptr() == place
    assert pool.buffer_of(torch.zeros(3)) is None
    assert pool.lend(100, torch.uint8).numel() == 100
    assert pool.held_bytes == 128 + 100


@pytest.mark.parametrize(
    ("copy_ms", "expected"),
    [((3, 2, 1), 2), ((3, 3, 3), None), ((1, 1, 1), 1), ((1, 3, 1), 4), ((1, 1, 3), None)],
)
def test_copies_begin_where_they_are_faster_at_every_larger_size(copy_ms, expected):
    rows = [Measured(2**place, 2.5, ms) for place, ms in enumerate(copy_ms)]
    assert break_even(rows) == expected


def refuse_here(world):
    dense, _ = spread(world, plan_of(1, 2, 1))
    told = []
    logging.getLogger("gem_parallel.copy_engine.choose").addHandler(Listener(told))
    logging.getLogger("gem_parallel.copy_engine.choose").setLevel(logging.INFO)
    nothing = gather_by_copy_engines(dense.module, world.device, way="nccl")
    other = gather_by_copy_engines(dense.module, world.device, way="measured")
    try:
        gather_by_copy_engines(dense.module, world.device, way="copy_engine")
    except UnsupportedError as refused:
        return nothing, other, told, str(refused)
    return None


class Listener(logging.Handler):
    def __init__(self, told):
        super().__init__()
        self.told = told

    def emit(self, record):
        self.told.append(record.getMessage())


def test_without_copy_engines_it_is_refused_by_name_or_told_and_left():
    for nothing, other, told, refused in run_ranks(refuse_here, 2):
        assert nothing == other == {}
        assert told == [
            "parameters are gathered by NCCL: the ranks compute on cpu, which has no copy engines"
        ]
        assert 'way must be "nccl" or "measured" here; got "copy_engine"; the ranks compute' in (
            refused
        )


def measure_on_gpus(world, store):
    world = nccl_world(world, store)
    assert why_not(dist.group.WORLD, world.device) is None
    return measure(dist.group.WORLD, world.device, sizes=(2**20, 2**24))


@pytest.mark.gpu2
def test_both_ways_are_timed_and_ranks_agree(tmp_path):
    first, second = run_ranks(measure_on_gpus, 2, tmp_path / "store")
    assert first == second
    assert [m.part_bytes for m in first] == [2**20, 2**24]
    assert all(0 < ms < 1e3 for m in first for ms in (m.nccl_ms, m.copy_ms))
