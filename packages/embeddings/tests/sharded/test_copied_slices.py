"""Fully sharded rows that are gathered by copies: the bits of collectives, and no more memory.

On a CPU slices lie in files that all ranks map; GPUs of one host use torch's symmetric memory
(marker gpu2).
"""

import pytest
import torch
import torch.distributed as dist

from gem_embeddings.contract import OptimizerSpec, TableSpec
from gem_embeddings.engine import build_tables
from gem_embeddings.planning.layout import place_tables
from gem_jagged.batch import Jagged
from gem_parallel.copy_engine.choose import GatherChoice
from gem_parallel.launch import World
from gem_parallel.testing import MappedBuffer, run_ranks

WIDTH, ROWS = 16, 600
# Bytes of a slice: weights are above, accumulators of the row-wise rule below.
SOME = 4_000
# rows, optimizer, what groups exchange, whether gathers begin ahead
CASES = [
    ("fp32", "rowwise_adagrad", "weights", False),
    ("fp32", "adam", "weights", True),
    ("bf16", "sgd", "weights", False),
    ("fp32", "adagrad", "gradients", True),
]


def engine_of(world, case, gathers):
    row_dtype, kind, replicas, _ = case
    specs = [
        TableSpec(
            name="big", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=("big",),
            row_dtype=row_dtype, init_std=0.5,
        )
    ]  # fmt: skip
    optimizer = OptimizerSpec(kind=kind, lr=0.1, eps=0.05)
    plan = place_tables(
        specs,
        {"big": "row_wise"},
        table_shard=world.size // 2,
        table_replicate=2,
        fully_sharded=True,
        optimizer=optimizer,
    )
    return build_tables(
        specs, (), plan, optimizer, world, seed=5, replicas=replicas, gathers=gathers
    )


def train(world, engine, ahead):
    for step in range(3):
        numbers = torch.Generator().manual_seed(10 * step + world.rank)
        ids = torch.randint(0, ROWS, (50,), generator=numbers)
        vectors = engine({"big": Jagged.from_lengths(ids, [5] * 10).to(world.device)})
        if ahead:
            engine.gather_ahead(backward=True)
        factors = torch.randn(10, WIDTH, generator=numbers).to(world.device)
        (vectors["big"] * factors).mean().backward()
        if ahead:
            engine.gather_ahead(backward=False)
        engine.sync()
    state = {name: piece.clone() for name, piece in engine.table_state().items()}
    engine.load_table_state(state)  # slices are written from outside, in place
    return [engine.full_weight("big").cpu(), engine.resident_bytes(), dict(engine.replicas.calls)]


def both_ways(world, folder):
    make = None if folder is None else lambda group, n: MappedBuffer(folder, group, n)
    found = []
    for case in CASES:
        choice = GatherChoice("copy_engine", at_least_bytes=SOME, make=make)
        found.append([train(world, engine_of(world, case, way), case[3]) for way in (None, choice)])
    return found


def check(by_rank):
    for found in by_rank:
        for case, (plain, copied) in zip(CASES, found, strict=True):
            assert torch.equal(plain[0], copied[0]), case
            assert torch.equal(found[0][0][0].isnan(), torch.zeros(ROWS, WIDTH, dtype=torch.bool))
            assert plain[1] == copied[1], case  # slices lie where peers see them, and only there
            gathers = copied[2]["copy_engine_gather"]
            assert gathers >= 6, case
            # Rows as narrow as an accumulator stay with the collective.
            rest = copied[2].get("all_gather", 0)
            assert gathers + rest == plain[2]["all_gather"], case
        assert found[0][1][2]["all_gather"] > 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_gathered_by_copies_have_the_bits_of_collectives(ranks, tmp_path):
    check(run_ranks(both_ways, ranks, str(tmp_path)))


def both_ways_on_gpus(world, store):
    torch.cuda.set_device(world.rank)
    dist.destroy_process_group()
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=world.rank, world_size=world.size
    )
    return both_ways(World(world.rank, world.size, torch.device("cuda", world.rank)), None)


@pytest.mark.gpu2
def test_two_gpus_gather_rows_by_copies_with_the_bits_of_nccl(tmp_path):
    check(run_ranks(both_ways_on_gpus, 2, tmp_path / "store"))
