"""Experts of other published models, over the same tokens as Wukong's and of the same output.

A model of one kind, or an ensemble of several (DHEN), is then a setting of `ExpertsSpec`. House
rules hold for all: no biases, norms without gains.

Source: DCNv2 (arXiv:2008.13535) for the cross network, DLRM (arXiv:1906.00091) for products of
pairs, AutoInt (arXiv:1810.11921) for attention among features, DHEN (arXiv:2203.11014) for the sum.
"""

import torch
from torch import Tensor, nn

from gem.model.expert_spec import ExpertKind, ExpertsSpec
from gem.model.spec import MlpActivation
from gem.model.structure import pair_count
from gem.model.token_linear import TokenLinear
from gem_precision.layers import LayerNorm, Mlp, Projection, RmsNorm


class CrossExpert(nn.Module):
    """DCNv2's cross network over all tokens, flattened, then as few tokens as the layer gives.

        x_{l+1} = x_0 * W_l x_l + x_l

    Args:
        tokens: tokens that come in.
        width: width of a token.
        spec: layers of the network, tokens that go out.
        activation: unused; the network has none.
        dropout: of the result of the network.
    """

    def __init__(
        self,
        tokens: int,
        width: int,
        spec: ExpertsSpec,
        *,
        activation: MlpActivation,
        dropout: float,
    ) -> None:
        super().__init__()
        del activation
        flat = tokens * width
        self.cross = nn.ModuleList(Projection(flat, flat) for _ in range(spec.cross_layers))
        self.dropout = nn.Dropout(dropout)
        self.compress = TokenLinear(tokens, spec.tokens)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Interact.

        Args:
            x_BND: this expert's tokens.

        Returns:
            tokens (B, fm_tokens + linear_tokens, D).
        """
        first = x = x_BND.flatten(1)
        for layer in self.cross:
            x = first * layer(x) + x
        return self.compress(self.dropout(x).view(x_BND.shape))


class DotExpert(nn.Module):
    """DLRM's interaction: the product of every pair of tokens, through an MLP.

        tokens = reshape(MLP(LayerNorm(x_i . x_j, i < j)))

    Args:
        tokens: tokens that come in; one alone has no pair and gives its own square.
        width: width of a token.
        spec: widths of the MLP, tokens that go out.
        activation: of the MLP.
        dropout: in the MLP.
    """

    def __init__(
        self,
        tokens: int,
        width: int,
        spec: ExpertsSpec,
        *,
        activation: MlpActivation,
        dropout: float,
    ) -> None:
        super().__init__()
        self.outputs = spec.tokens
        pairs = pair_count(tokens)
        place = torch.triu_indices(tokens, tokens, offset=1 if tokens > 1 else 0)
        self.place: Tensor
        self.register_buffer("place", place[0] * tokens + place[1], persistent=False)
        self.norm = LayerNorm(pairs) if pairs > 1 else nn.Identity()
        widths = (pairs, *spec.mlp_widths, spec.tokens * width)
        self.mlp = Mlp(widths, activation=activation, dropout=dropout)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Interact.

        Args:
            x_BND: this expert's tokens.

        Returns:
            tokens (B, fm_tokens + linear_tokens, D).
        """
        batch, _, width = x_BND.shape
        products = torch.bmm(x_BND, x_BND.transpose(1, 2)).flatten(1)
        pairs = products.index_select(1, self.place)
        return self.mlp(self.norm(pairs)).view(batch, self.outputs, width)


class MlpExpert(nn.Module):
    """An MLP of all tokens, flattened: the deep side of DCNv2, DIN and others.

    Args:
        tokens: tokens that come in.
        width: width of a token.
        spec: widths of the MLP, tokens that go out.
        activation: of the MLP.
        dropout: in the MLP.
    """

    def __init__(
        self,
        tokens: int,
        width: int,
        spec: ExpertsSpec,
        *,
        activation: MlpActivation,
        dropout: float,
    ) -> None:
        super().__init__()
        self.outputs = spec.tokens
        widths = (tokens * width, *spec.mlp_widths, spec.tokens * width)
        self.mlp = Mlp(widths, activation=activation, dropout=dropout)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Interact.

        Args:
            x_BND: this expert's tokens.

        Returns:
            tokens (B, fm_tokens + linear_tokens, D).
        """
        batch, _, width = x_BND.shape
        return self.mlp(x_BND.flatten(1)).view(batch, self.outputs, width)


class AttentionExpert(nn.Module):
    """Tokens attend to each other, with a residual, then as few tokens as the layer gives.

    Args:
        tokens: tokens that come in.
        width: width of a token.
        spec: heads, tokens that go out.
        activation: unused; the expert has no MLP.
        dropout: of what the attention adds.
    """

    def __init__(
        self,
        tokens: int,
        width: int,
        spec: ExpertsSpec,
        *,
        activation: MlpActivation,
        dropout: float,
    ) -> None:
        super().__init__()
        del activation
        self.heads = spec.attention_heads
        self.norm = RmsNorm(width)
        self.qkv = Projection(width, 3 * width)
        self.out = Projection(width, width)
        self.dropout = nn.Dropout(dropout)
        self.compress = TokenLinear(tokens, spec.tokens)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Interact.

        Args:
            x_BND: this expert's tokens.

        Returns:
            tokens (B, fm_tokens + linear_tokens, D).
        """
        batch, tokens, width = x_BND.shape
        own = width // self.heads
        qkv = self.qkv(self.norm(x_BND)).view(batch, tokens, 3, self.heads, own)
        # A few tokens an example: batched products of all heads, as small as the others here.
        q, k, v = qkv.permute(2, 0, 3, 1, 4).reshape(3, batch * self.heads, tokens, own).unbind(0)
        scores = torch.bmm(q, k.transpose(1, 2)) * own**-0.5
        read = torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v)
        read = read.view(batch, self.heads, tokens, own).transpose(1, 2).reshape(x_BND.shape)
        return self.compress(x_BND + self.dropout(self.out(read)))


EXPERTS: dict[ExpertKind, type[nn.Module]] = {
    "cross": CrossExpert,
    "dot": DotExpert,
    "mlp": MlpExpert,
    "attention": AttentionExpert,
}
