"""A linear map over the tokens of an example; tokens of zeros, for what a product reads at once."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Elements of bf16 in 16 bytes. Rows of other lengths are read two or four bytes at a time, by
# kernels that take twice as long.
_AT_ONCE = 8


def filled_up(x_BND: Tensor) -> Tensor:
    """Add tokens of zeros until products over tokens read whole elements of 16 bytes.

    Args:
        x_BND: tokens.

    Returns:
        at most seven tokens more, for bf16 on a GPU; other tensors as they are.
    """
    missing = -x_BND.shape[1] % _AT_ONCE
    return F.pad(x_BND, (0, 0, 0, missing)) if missing and reads_wide(x_BND) else x_BND


def reads_wide(x: Tensor) -> bool:
    """Tell whether products of a tensor read 16 bytes at once.

    Args:
        x: of any shape.

    Returns:
        whether it is bf16 on a GPU.
    """
    return x.is_cuda and x.dtype == torch.bfloat16


class TokenLinear(nn.Module):
    """Mix tokens linearly, each model dim alike: out[b, m] = Σ_n weight[m, n] x[b, n].

    Args:
        inputs: tokens that come in.
        outputs: tokens that go out.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Mix the tokens.

        Args:
            x_BND: tokens; behind those that come in there may be such as `filled_up` adds.

        Returns:
            tokens (B, outputs, D).
        """
        # A batched product with a broadcast weight: a plain matmul would first copy the tokens
        # into a transposed layout, which costs more than the product at these sizes. On a GPU it
        # is cast before it is broadcast; autocast would cast what each example reads.
        weight = self.weight.to(x_BND.dtype) if x_BND.is_cuda else self.weight
        x_BND = filled_up(x_BND)
        if added := x_BND.shape[1] - weight.shape[1]:
            weight = F.pad(weight, (0, added))
        return torch.bmm(weight.expand(x_BND.shape[0], -1, -1), x_BND)
