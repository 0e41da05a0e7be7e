"""A linear map over the tokens of an example."""

import torch
from torch import Tensor, nn


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
            x_BND: tokens.

        Returns:
            tokens (B, outputs, D).
        """
        # A batched product with a broadcast weight: a plain matmul would first copy the tokens
        # into a transposed layout, which costs more than the product at these sizes. On a GPU it
        # is cast before it is broadcast; autocast would cast what each example reads.
        weight = self.weight.to(x_BND.dtype) if x_BND.is_cuda else self.weight
        return torch.bmm(weight.expand(x_BND.shape[0], -1, -1), x_BND)
