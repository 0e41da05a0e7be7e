"""What only a GPU shows of ``jagged_flash_attention``: whole graphs, tuning, real length sets."""

import sys
from pathlib import Path

import pytest
import torch

from gem_attention.ops import jagged_flash_attention
from gem_attention.patterns import visible_pairs
from gem_attention.portable.launching import kernel as launching
from gem_jagged.batch import Layout
from gem_jagged.ops import jagged_mean, jagged_take_last, last_layout
from gem_jagged.workloads import zipf_lengths
from gem_opkit import tuning
from gem_opkit.testing import (
    check_compiles_whole,
    check_kernel_on_gpu,
    check_run_budget,
    check_runs_equal,
    fresh,
    run_with_gradients,
)

sys.path.insert(0, str(Path(__file__).parent))

from test_jagged_flash_attention import gpu_inputs, inputs, variant, with_lse

pytestmark = pytest.mark.gpu


def block(q, k, v, layout, kept, pairs):
    """What a layer does: attend, keep the last tokens, average the rest."""
    out = jagged_flash_attention(q, k, v, layout, causal=True, visible_pairs=pairs, impl="triton")
    last, _ = jagged_take_last(out, layout, 3, kept=kept, impl="triton")
    return last, jagged_mean(out, layout, impl="triton")


def block_inputs(lengths, *, width, dtype):
    layout = Layout.from_lengths(list(lengths), device="cuda")
    tensors = [
        torch.randn(sum(lengths), 2, width, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(3)
    ]
    pairs = visible_pairs(layout.lengths, layout.lengths, None, 0)
    return *tensors, layout, last_layout(layout, 3), pairs


LENGTH_SETS = [(70, 33, 5), (129, 2, 64), (40, 300, 7, 90), (65, 66, 67)]


# The kernels for Hopper, and those for any GPU.
@pytest.mark.parametrize(("width", "dtype"), [(128, torch.bfloat16), (48, torch.float16)])
def test_a_block_compiles_whole_over_changing_lengths(width, dtype):
    # Bits of the gradients of q differ from run to run on Hopper; the budget of two runs holds.
    check_compiles_whole(
        block, [block_inputs(lengths, width=width, dtype=dtype) for lengths in LENGTH_SETS]
    )


# Other lengths, then another number of sequences: without ``dynamic=True`` torch takes each for a
# constant until it changes. -> graphs so far
GRAPHS = {
    (70, 33, 5): 1,
    (129, 2, 64): 2,
    (65, 66, 67): 2,
    (40, 300, 7, 90): 3,
    (9, 80, 4, 3, 31): 3,
}


def test_the_default_backend_makes_one_more_graph_for_what_changes():
    from torch._dynamo.backends.registry import lookup_backend

    graphs = []
    inductor = lookup_backend("inductor")

    def counting(module, example_inputs):
        graphs.append(module)
        return inductor(module, example_inputs)

    torch._dynamo.reset()
    whole = torch.compile(block, fullgraph=True, backend=counting)
    for lengths, most in GRAPHS.items():
        args = block_inputs(lengths, width=64, dtype=torch.bfloat16)
        check_runs_equal(
            run_with_gradients(whole, fresh(args)), run_with_gradients(block, fresh(args))
        )
        assert 1 <= len(graphs) <= most, lengths
    torch._dynamo.reset()


@pytest.mark.parametrize("width", [64, 128])
def test_zipf_lengths(width):
    # One giant among dwarfs, by the law that histories follow.
    lengths = zipf_lengths(96, 4096, alpha=1.2, seed=3)
    assert max(lengths) > 1000 > 2 > min(lengths)
    check_kernel_on_gpu(
        with_lse(window=(300, 0)),
        variant(window=(300, 0), impl="reference"),
        gpu_inputs(lengths, lengths, widths=(width, width)),
        dtypes=(torch.bfloat16,),
    )


def test_a_search_tries_each_bucket_once_and_keeps_what_it_found(monkeypatch, tmp_path):
    monkeypatch.setenv("GEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launching, "CANDIDATES", launching.CANDIDATES[1:2])
    searched = []
    search = tuning._search
    monkeypatch.setattr(
        tuning, "_search", lambda bucket, *rest: searched.append(bucket) or search(bucket, *rest)
    )
    attend = variant(impl="triton")
    batches = [
        fresh(inputs(lengths, width=48), dtype=torch.bfloat16, device="cuda")
        for lengths in ((700, 513, 0), (800, 650, 3))
    ]
    plain = [run_with_gradients(attend, fresh(args)) for args in batches]
    assert searched == []  # nobody asked for a search
    with tuning.searching():
        found = [run_with_gradients(attend, fresh(args)) for args in batches]
    # Forward and the two halves of the backward, although lengths changed.
    assert len(searched) == len(set(searched)) == 3
    (file,) = tmp_path.glob("tuning/*.json")
    assert all(bucket in file.read_text() for bucket in searched)
    again = [run_with_gradients(attend, fresh(args)) for args in batches]
    assert len(searched) == 3
    for args, *runs in zip(batches, plain, found, again, strict=True):
        exact = run_with_gradients(variant(impl="reference"), fresh(args, dtype=torch.float64))
        low = run_with_gradients(variant(impl="reference"), fresh(args))
        for run in runs:
            check_run_budget(run, low, exact)
