"""Sharded weights of layers in block FP8 travel in 8 bits: fewer bytes, and the same run."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from gem.config import RunConfig
from gem.planning.chosen import not_counted
from gem.train.checkpoint_tensors import model_tensors
from gem.train.progress import Display
from gem.train.run import build_run, torch_settings
from gem.train.shared_weights import shares_of
from gem_opkit.errors import ConfigError
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks
from gem_precision.gathered import EightBitGather

RANKS = 2
BASE = (
    *("model.dropout=0.0", "model.embeddings.initial_rows=by_place", "data.max_rows=96"),
    *('model.layers=["interaction", "interaction"]', "model.experts.mlp_widths=[256, 256]"),
    *("train.log_every_steps=1", "train.dense.lr=1e-2", "train.ema_decay=0.5"),
    *("parallel.shard=2", "parallel.table_replicate=2", "parallel.replicate_below=40"),
    *('precision.recipe="fp8_block"', "precision.least_width=16"),
)
EIGHT = "precision.gather_in_8_bits=true"


class Gathered(TorchDispatchMode):
    """Counts the bytes that a rank gives to all-gathers."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "c10d" in name and "allgather_base" in name:  # what FSDP calls; rows of tables do not
            given = [t for t in args if isinstance(t, torch.Tensor)]
            self.bytes += min(t.numel() * t.element_size() for t in given)
        return func(*args, **(kwargs or {}))


def learn(config: RunConfig, world: World, data_root):
    """Losses and norms of steps, bytes gathered, and all weights and averages of this rank."""
    with torch_settings(config.train):
        run = build_run(config, data_root / "unused", world, Display(None), data_root)
        run.step.model.train()
        found, sent = [], []
        for number, batch in enumerate(run.reader.batches("train")):
            with Gathered() as counted:
                scored = run.step(batch, number)
            sent.append(counted.bytes)
            found.append([float(all_reduce_sum(scored.loss.double(), world)), scored.grad_norm])
    model = run.step.model
    kinds = {
        name: [*p.shape]
        for name, p in model.named_parameters()
        if isinstance(p, DTensor) and isinstance(p._local_tensor, EightBitGather)
    }
    tensors = {**model_tensors(model), **{f"ema/{n}": t for n, t in run.step.ema.items()}}
    held = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    plain = all(type(t) is torch.Tensor for n, t in held.items() if n.startswith("model/"))
    values = {
        name: (t.held if isinstance(t, EightBitGather) else t).detach().clone().numpy()
        for name, t in held.items()
    }
    return [[x, float(y)] for x, y in found], sent, kinds, plain, values


def learn_all(world: World, configs: dict[str, RunConfig], data_root):
    return {name: learn(config, world, data_root) for name, config in configs.items()}


def test_a_run_is_the_same_to_the_bit_in_fewer_bytes(tiny, data_root):
    """A byte an element and four a block of 128x128, in place of four an element; twice a step."""
    configs = {"as they are": tiny(*BASE), "8 bits": tiny(*BASE, EIGHT)}
    for rank in run_ranks(learn_all, RANKS, configs, data_root):
        losses, sent, kinds, plain, tensors = rank["8 bits"]
        wanted, before, others, _, same = rank["as they are"]
        assert len(losses) >= 3
        assert losses[-1] != losses[0]
        assert losses == wanted
        assert plain  # what a checkpoint writes and reads
        assert same.keys() == tensors.keys()
        for name, values in same.items():
            assert (tensors[name] == values).all(), name
        # Both layers of 256 outputs in each of two experts; the last layer of all is in bf16.
        assert sorted(kinds.values()) == [[256, 20]] * 2 + [[256, 256]] * 2, kinds
        assert not others
        saved = 0
        for rows, columns in kinds.values():
            blocks = (rows // RANKS // 128) * -(-columns // 128)
            saved += 3 * (rows // RANKS) * columns - 4 * blocks
        pairs = zip(before, sent, strict=True)
        assert [more - less for more, less in pairs] == [2 * saved] * len(sent)


def test_who_shares_a_weight(tiny, data_root):
    run = build_run(
        tiny('model.layers=["interaction"]', "model.experts.count=2"),
        data_root / "unused", World(), Display(None), data_root,
    )  # fmt: skip
    config = tiny(*("parallel.shard=2", "parallel.expert=2", "parallel.table_replicate=4"))
    parts = shares_of(config.parallel, run.step.model)
    of_expert = "layers.0.experts.experts.1.factorise.mlp.projections.1"
    assert parts(of_expert, 1 << 20) == 2
    assert parts("layers.0.summary.mlp.projections.0", 1 << 20) == 4
    assert parts(of_expert, 100) == 1


def test_nothing_to_gather_in_8_bits_is_refused(tiny):
    for settings in (["precision.recipe=mxfp8_rceil"], []):
        with pytest.raises(ConfigError, match="must stand beside a recipe or rule in 'fp8_block'"):
            tiny(*settings, EIGHT)


def test_a_plan_says_that_it_does_not_count_them(tiny):
    keys = ("precision.recipe", "precision.gather_in_8_bits")
    assert not_counted(tiny('precision.recipe="fp8_block"', EIGHT)) == keys
