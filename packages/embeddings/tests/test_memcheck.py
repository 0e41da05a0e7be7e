"""Every kernel on small odd sizes, quick enough to be repeated under compute-sanitizer."""

import sys
from pathlib import Path

import pytest
import torch

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.ops import id_weight_gradient, table_lookup, table_update
from gem_opkit.launched import kernels_of, launched_kernels
from gem_opkit.testing import check_budget, poisoned_empty

sys.path.insert(0, str(Path(__file__).parent))

from table_calls import batch_of

# A bag of several pieces, an empty one, and one of a single id; no count is a multiple of a tile.
LENGTHS = (3, 0, 131, 1)
CASES = [([(7, 5), (9, 7)], torch.float32), ([(70, 130), (9, 130)], torch.float16)]
FEATURES = [(0, "sum"), (1, "none"), (1, "mean")]


def run(shapes, dtype, *, device, exact=False):
    """Forward, both gradients and an update, as CPU tensors; ``exact`` in fp64."""
    wide = torch.float64 if exact else torch.float32
    weights, ids, bags, id_weights, layout, counts = (
        x.to(device) if isinstance(x, torch.Tensor) else x
        for x in batch_of(LENGTHS, shapes=shapes, features=FEATURES, dtype=dtype, hot=True)
    )
    weights = weights.double() if exact else weights
    id_weights = id_weights.to(wide).requires_grad_()
    leaf = weights.clone().requires_grad_()
    given = {"counts": counts}
    with poisoned_empty("all"):
        flat, _ = table_lookup(leaf, ids, bags, layout, id_weights_I=id_weights, **given)
        grad = torch.linspace(-1, 1, flat.shape[0], device=device).to(wide)
        flat.backward(grad)
        state = torch.ones(layout.rows, dtype=wide, device=device)
        table_update(
            weights, [state], ids, bags, grad, layout, spec=OptimizerSpec(lr=0.1),
            seed=1, **given,
        )  # fmt: skip
        dot = id_weight_gradient(grad, leaf.detach(), ids, bags, layout, **given)
    return [x.detach().cpu() for x in (flat, id_weights.grad, state, dot, leaf.grad, weights)]


# What is right is computed on the CPU: under the sanitizer every kernel of torch is slow too.
@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize(("shapes", "dtype"), CASES)
def test_right_on_odd_sizes(shapes, dtype):
    kernels = run(shapes, dtype, device="cuda")
    low = run(shapes, dtype, device="cpu")
    exact = run(shapes, dtype, device="cpu", exact=True)
    for a, b, c in zip(kernels, low, exact, strict=True):
        check_budget(a, b, c, noise_scale=10.0)


@pytest.mark.gpu
def test_no_kernel_is_left_out():
    with launched_kernels() as started:
        for shapes, dtype in CASES:
            run(shapes, dtype, device="cuda")
    assert kernels_of("gem_embeddings") <= started
