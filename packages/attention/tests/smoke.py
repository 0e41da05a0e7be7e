"""Run one operator with only this package's wheels installed; exit status 1 if it is wrong."""

import sys

import torch

from gem_attention.ops import jagged_flash_attention
from gem_jagged.batch import Layout


def main() -> int:
    layout = Layout.from_lengths([2, 0, 3])
    q, k, v = torch.randn(3, 5, 2, 8, requires_grad=True).unbind(0)
    out = jagged_flash_attention(q, k, v, layout)
    expected = torch.cat(
        [
            torch.einsum(
                "hts,shv->thv", (torch.einsum("thk,shk->hts", a, b) / 8**0.5).softmax(-1), c
            )
            for a, b, c in ((q[:2], k[:2], v[:2]), (q[2:], k[2:], v[2:]))
        ]
    )
    grad, wanted = (torch.autograd.grad(x.square().sum(), q)[0] for x in (out, expected))
    right = torch.allclose(out, expected, atol=1e-5) and torch.allclose(grad, wanted, atol=1e-5)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
