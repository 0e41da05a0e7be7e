"""FSDP2 gathers a weight in 8 bits: half the bytes of bf16, and the numbers of block FP8."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from gem_opkit.errors import ConfigError, UnsupportedError
from gem_precision.contract import LinearFormats
from gem_precision.gathered import EightBitGather, gather_in_8_bits, gather_layers_in_8_bits
from gem_precision.kernels.quantized_linear.op import formats_named
from gem_precision.layers import Projection
from gem_precision.ops import block_dequantize, block_quantize

IN, OUT, RANKS = 256, 512, 2


class Gathered(TorchDispatchMode):
    """Counts the bytes that a rank gives to all-gathers."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "allgather" in name.replace("_", "") and "c10d" in name:
            given = [t for t in args if isinstance(t, torch.Tensor)]
            self.bytes += min(t.numel() * t.element_size() for t in given)
        return func(*args, **(kwargs or {}))


def layer_of(seed=0):
    torch.manual_seed(seed)
    return Projection(IN, OUT)


def trained(rank, *, in_8_bits, steps=2):
    """Bytes of the first gather, losses, and the whole weight afterwards."""
    layer = layer_of()
    if in_8_bits:
        gather_in_8_bits(layer)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, foreach=False)
    draw = torch.Generator().manual_seed(1 + rank)
    losses, sent = [], 0
    for _ in range(steps):
        x = torch.randn(8, IN, generator=draw)
        with Gathered() as counted:
            y = layer(x)
        sent = sent or counted.bytes
        loss = y.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    local = layer.weight.to_local()
    held = local.held if isinstance(local, EightBitGather) else local
    parts = [torch.empty_like(held) for _ in range(RANKS)]
    dist.all_gather(parts, held.detach().contiguous())
    return sent, losses, torch.cat(parts), type(local).__name__


def by_hand(*, steps=2):
    """The same run in one process, on the weight as block FP8 holds it."""
    weight = layer_of().weight.detach().clone()
    momentum = torch.zeros_like(weight)
    draws = [torch.Generator().manual_seed(1 + rank) for rank in range(RANKS)]
    losses = []
    for step in range(steps):
        seen = block_dequantize(block_quantize(weight, block="128x128")).bfloat16()
        seen.requires_grad_()
        grads, found = [], []
        for draw in draws:
            x = torch.randn(8, IN, generator=draw).bfloat16()
            loss = F.linear(x, seen).float().square().mean()
            (grad,) = torch.autograd.grad(loss, seen)
            grads.append(grad.float())
            found.append(float(loss.detach()))
        momentum = (
            0.9 * momentum + torch.stack(grads).mean(0) if step else torch.stack(grads).mean(0)
        )
        weight = weight - 0.1 * momentum
        losses.append(found)
    return losses, weight


def worker(rank, store, results):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        found = {kind: trained(rank, in_8_bits=kind == "8 bits") for kind in ("bf16", "8 bits")}
        plain = {k: (sent, losses, w.numpy(), kind) for k, (sent, losses, w, kind) in found.items()}
        results.put((rank, plain))
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    context = mp.get_context("spawn")
    results = context.Queue()
    store = tmp_path_factory.mktemp("store") / "file"
    processes = [context.Process(target=worker, args=(r, store, results)) for r in range(RANKS)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in range(RANKS))
    for process in processes:
        process.join(timeout=60)
    assert all(process.exitcode == 0 for process in processes)
    return found


def test_half_the_bytes_go_over_the_wire(runs):
    blocks = (OUT // RANKS // 128) * (IN // 128)
    for found in runs.values():
        assert found["bf16"][0] == 2 * OUT // RANKS * IN
        assert found["8 bits"][0] == OUT // RANKS * IN + 4 * blocks
        assert found["8 bits"][0] < 0.51 * found["bf16"][0]


def test_layers_compute_with_the_numbers_of_block_fp8_and_train_in_fp32(runs):
    losses, weight = by_hand()
    for rank, found in runs.items():
        assert found["8 bits"][1] == pytest.approx([each[rank] for each in losses], rel=1e-3)
        assert found["8 bits"][1] != found["bf16"][1]
        assert found["8 bits"][3] == "EightBitGather"
        torch.testing.assert_close(
            torch.from_numpy(found["8 bits"][2]), weight, rtol=1e-3, atol=1e-5
        )


def test_a_product_in_block_fp8_loses_nothing_more():
    weight = torch.randn(256, 384)
    once = block_dequantize(block_quantize(weight, block="128x128"))
    assert torch.equal(block_dequantize(block_quantize(once, block="128x128")), once)
    assert torch.equal(once.bfloat16().float(), once)


def test_what_cannot_be_gathered_is_refused():
    layer = layer_of()
    gather_in_8_bits(layer)
    with pytest.raises(ConfigError, match="layer must have a plain weight; got EightBitGather"):
        gather_in_8_bits(layer)

    class Mesh:
        @staticmethod
        def size():
            return 3

    with pytest.raises(UnsupportedError, match=r"multiple of the 3 ranks .* got 512"):
        layer.weight.fsdp_pre_all_gather(Mesh, layer.weight.shape, None, layer, None)


def test_the_layer_alone_is_as_before():
    layer, plain, x = layer_of(), layer_of(), torch.randn(3, IN)
    gather_in_8_bits(layer)
    y = layer(x)
    assert torch.equal(y, plain(x))
    y.sum().backward()
    plain(x).sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_which_layers_are_gathered_in_8_bits_and_why_others_are_not():
    both = formats_named("fp8_block")
    one = LinearFormats(forward="fp8_block")
    layers = {name: layer_of() for name in ("sent", "other", "alone", "ragged", "first", "second")}
    layers["second"].weight = layers["first"].weight
    model = torch.nn.ModuleDict(layers)
    formats = {name: one if name == "other" else both for name in layers}
    ranks = {"alone": 1, "ragged": 3}
    done = gather_layers_in_8_bits(model, formats, parts=lambda name, _: ranks.get(name, 2))
    assert done.names == ("sent",)
    assert type(layers["sent"].weight) is EightBitGather
    assert layers["second"].weight is layers["first"].weight
    for name, why in {
        "other": "its other product is in",
        "alone": "whole on every rank",
        "ragged": "no whole blocks of 128 on each of 3 ranks",
        "first": "another layer's weight too",
        "second": "another layer's weight too",
    }.items():
        assert why in done.kept[name]
    assert done.told().startswith("1 weights gathered in 8 bits; ")
