"""Ways from the events of a history to a few summary tokens, beside hierarchical seed pooling.

An empty history gives zeros in all of them. Seed pooling and attention from the candidate are
layers of `gem_attention`.

Source: Lee et al. 2019 (arXiv:1810.00825) for pooling by multi-head attention, InterFormer
(arXiv:2411.09852) for the latest events as tokens of their own.
"""

import torch
from torch import Tensor, nn

from gem_attention.contract import AttentionSpec
from gem_attention.layers import PooledAttention
from gem_jagged.batch import Layout
from gem_jagged.ops import jagged_mean
from gem_precision.layers import Mlp, MlpActivation, Projection, RmsNorm


class MultiHeadPooling(nn.Module):
    """PMA: one learned query a token, then an MLP with a residual.

        H = MHA(E, S, S)      Y = H + MLP(RmsNorm(H))

    The queries' own residual is left out, so that an empty history says nothing.

    Args:
        width: width of the events and of the tokens.
        spec: softmax attention over the whole history.
        tokens: tokens of the result, above 0.
        activation: of the MLP, whose hidden width is that of the tokens.
    """

    def __init__(
        self, width: int, spec: AttentionSpec, tokens: int, *, activation: MlpActivation
    ) -> None:
        super().__init__()
        self.pool = PooledAttention(width, spec, tokens)
        self.norm = RmsNorm(width)
        self.mlp = Mlp((width, width, width), activation=activation)

    def forward(self, x_TD: Tensor, layout: Layout) -> Tensor:
        """Pool.

        Args:
            x_TD: events.
            layout: where each history begins.

        Returns:
            tokens_BPD.
        """
        pooled_BPD = self.pool(x_TD, layout)
        return pooled_BPD + self.mlp(self.norm(pooled_BPD))


class MeanPooling(nn.Module):
    """The mean of a history; for several tokens a linear map of it.

    Args:
        width: width of the events and of the tokens.
        tokens: tokens of the result, above 0.
    """

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.spread = Projection(width, tokens * width) if tokens > 1 else nn.Identity()

    def forward(self, x_TD: Tensor, layout: Layout) -> Tensor:
        """Pool.

        Args:
            x_TD: events.
            layout: where each history begins.

        Returns:
            tokens_BPD.
        """
        return self.spread(jagged_mean(x_TD, layout)).unflatten(1, (self.tokens, x_TD.shape[1]))


def latest_tokens(x_TD: Tensor, layout: Layout, count: int) -> Tensor:
    """Take the last events of each history as they are.

    Args:
        x_TD: events, oldest first.
        layout: where each history begins.
        count: events to take.

    Returns:
        tokens_BPD, the latest event last; 0 where a history has fewer events.
    """
    starts_B, ends_B = layout.offsets_O[:-1], layout.offsets_O[1:]
    if x_TD.shape[0] == 0:
        return x_TD.new_zeros(starts_B.shape[0], count, x_TD.shape[1])
    back = torch.arange(count, 0, -1, dtype=ends_B.dtype, device=ends_B.device)
    place = ends_B.unsqueeze(1) - back
    there = place >= starts_B.unsqueeze(1)
    taken = x_TD.index_select(0, place.clamp_min(0).flatten())
    return taken.view(*place.shape, -1) * there.unsqueeze(-1)
