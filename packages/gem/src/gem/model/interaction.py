"""The non-sequence side of a layer: a mixture of experts over tokens and summaries.

Every example visits every expert; there is no router. Each expert reads a fixed part of the
tokens beside the pooled summaries of the streams, and their outputs are summed, so that experts
may live on different devices with nothing but dense collectives between them. Here is Wukong's
expert; those of other models are in `gem.model.expert_kinds`.

Source: Wukong (arXiv:2403.02545) for the expert, DHEN (arXiv:2203.11014) for the sum and its
shortcut, Kunlun (arXiv:2602.10016) for the mixture and the summary.
"""

from collections.abc import Callable
from functools import reduce
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem.model.expert_gradients import inputs_beside, pair_products_beside
from gem.model.expert_kinds import EXPERTS
from gem.model.expert_spec import ExpertsSpec
from gem.model.joins import in_halves
from gem.model.spec import MlpActivation
from gem.model.structure import expert_parts
from gem.model.token_linear import TokenLinear, filled_up
from gem_opkit.errors import ConfigError, refusal
from gem_precision.layers import LayerNorm, Mlp, RmsNorm


class Summary(nn.Module):
    """Make the few tokens that tell the event sequences about everything else (X_sum).

    Args:
        tokens: tokens that come in.
        summary_tokens: tokens that go out.
        width: width of both.
        hidden: hidden width of the MLP over the model dim.
        activation: of the MLP.
    """

    def __init__(
        self,
        tokens: int,
        summary_tokens: int,
        *,
        width: int,
        hidden: int,
        activation: MlpActivation,
    ) -> None:
        super().__init__()
        self.compress = TokenLinear(tokens, summary_tokens)
        self.mlp = Mlp((width, hidden, width), activation=activation)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Summarise.

        Args:
            x_BND: non-sequence tokens.

        Returns:
            summary (B, summary_tokens, D).
        """
        return self.mlp(self.compress(x_BND))


class LearnedProjection(nn.Module):
    """Y of Wukong's X (Xᵀ Y) as a parameter, the same for every example.

    Args:
        tokens: tokens that come in.
        rank: columns of Y.
    """

    def __init__(self, tokens: int, rank: int) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.randn(tokens, rank) * tokens**-0.5)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Give each example its Y.

        Args:
            x_BND: tokens.

        Returns:
            Y (B, N, rank).
        """
        y = self.y.to(x_BND.dtype) if x_BND.is_cuda else self.y
        return y.expand(x_BND.shape[0], -1, -1)


class AttentiveProjection(nn.Module):
    """Y made from the example's own tokens, compressed: Wukong's attentive form.

    Args:
        tokens: tokens that come in.
        width: width of a token.
        spec: rank, and the hidden width of the MLP.
        activation: of the MLP.
    """

    def __init__(
        self, tokens: int, width: int, spec: ExpertsSpec, *, activation: MlpActivation
    ) -> None:
        super().__init__()
        self.tokens, self.rank = tokens, spec.rank
        self.compress = TokenLinear(tokens, spec.rank)
        widths = (spec.rank * width, *spec.mlp_widths[:1], tokens * spec.rank)
        self.mlp = Mlp(widths, activation=activation)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Give each example its Y.

        Args:
            x_BND: tokens.

        Returns:
            Y (B, N, rank).
        """
        flat = self.mlp(self.compress(x_BND).flatten(1))
        return flat.view(x_BND.shape[0], self.tokens, self.rank)


def pair_products(x_BND: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply pairs of tokens, compressed: X Xᵀ Y of each example.

    Args:
        x_BND: tokens X; behind those of Y there may be such as `filled_up` adds.
        y: Y, (B, N, rank).

    Returns:
        (B, N, rank), and X for the one product that reads it besides. On a GPU in bf16, of tokens
        that are fewer than they are wide, by way of all pairs; else by way of Xᵀ Y, which the FLOPs
        of the model count.
    """
    tokens = y.shape[1]
    if added := x_BND.shape[1] - tokens:
        pairs, x_BND = pair_products(x_BND, F.pad(y, (0, 0, 0, added)))
        return pairs[:, :tokens], x_BND
    if 2 * tokens <= x_BND.shape[2]:
        if in_halves(x_BND, y):
            return pair_products_beside(x_BND, y)
        if torch.compiler.is_compiling() and x_BND.is_cuda and x_BND.dtype == torch.bfloat16:
            # The graph adds gradients of X up by itself.
            return torch.bmm(torch.bmm(x_BND, x_BND.transpose(1, 2)), y), x_BND
    return torch.bmm(x_BND, torch.bmm(x_BND.transpose(1, 2), y)), x_BND


class FactorisationBlock(nn.Module):
    """Wukong's FMB: pairwise products of tokens, compressed, through an MLP, as new tokens.

        tokens = reshape(MLP(norm(flatten(X (Xᵀ Y)))))

    X Xᵀ would hold every pair; Y keeps `rank` combinations of them at a cost linear in tokens. The
    norm is LayerNorm or, as the spec says, SwishRMSNorm.

    Args:
        tokens: tokens that come in.
        width: width of a token.
        spec: rank, number of tokens that go out, MLP, where Y comes from.
        activation: of the MLPs.
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
        self.fm_tokens, self.width = spec.fm_tokens, width
        self.make_y = (
            LearnedProjection(tokens, spec.rank)
            if spec.projection == "learned"
            else AttentiveProjection(tokens, width, spec, activation=activation)
        )
        pairs = tokens * spec.rank
        self.norm = LayerNorm(pairs) if spec.block_norm == "layer" else RmsNorm(pairs, swish=True)
        widths = (tokens * spec.rank, *spec.mlp_widths, spec.fm_tokens * width)
        self.mlp = Mlp(widths, activation=activation, dropout=dropout)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Interact.

        Args:
            x_BND: tokens.

        Returns:
            tokens (B, fm_tokens, D).
        """
        return self.beside(x_BND)[0]

    def beside(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Interact, and give the tokens on.

        Args:
            x_BND: tokens, as `pair_products` takes them.

        Returns:
            tokens (B, fm_tokens, D), and those that came in, as `pair_products` gives them.
        """
        pairs, x_BND = pair_products(x_BND, self.make_y(x_BND))
        mixed = self.mlp(self.norm(pairs.flatten(1)))
        return mixed.view(x_BND.shape[0], self.fm_tokens, self.width), x_BND


class WukongExpert(nn.Module):
    """One expert: a factorisation block beside a linear compression of the same tokens.

    Args:
        tokens: tokens that come in.
        width: width of a token.
        spec: sizes.
        activation: of the MLPs.
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
        self.factorise = FactorisationBlock(
            tokens, width, spec, activation=activation, dropout=dropout
        )
        self.compress = TokenLinear(tokens, spec.linear_tokens)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Interact.

        Args:
            x_BND: this expert's tokens.

        Returns:
            tokens (B, fm_tokens + linear_tokens, D); a part of the sum over experts.
        """
        return torch.cat(self.halves(x_BND), dim=1)

    def halves(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Interact, with the output in its two parts.

        Args:
            x_BND: this expert's tokens.

        Returns:
            tokens (B, fm_tokens, D) and (B, linear_tokens, D).
        """
        mixed, x_BND = self.factorise.beside(filled_up(x_BND))
        return mixed, self.compress(x_BND)


def sum_of_experts(experts: nn.ModuleList, parts: list[Tensor]) -> Tensor:
    """Run each expert on its part and add the outputs up, in order.

    Args:
        experts: one for each part.
        parts: what they read, (B, n, D) each.

    Returns:
        the sum (B, tokens, D).
    """
    if all(type(expert) is WukongExpert for expert in experts):
        # Summed in their parts, which are joined once.
        halves = [cast(WukongExpert, e).halves(p) for e, p in zip(experts, parts, strict=True)]
        return torch.cat([reduce(torch.add, half) for half in zip(*halves, strict=True)], dim=1)
    return reduce(torch.add, (expert(part) for expert, part in zip(experts, parts, strict=True)))


class ExpertMixture(nn.Module):
    """The experts of a layer: X' = RmsNorm(Σ_e expert_e(part_e(X) ‖ H) + shortcut(X)).

    ``run`` computes the sum over experts. Whoever spreads experts over devices replaces it by a
    function of the same arguments that has the same result.

    Args:
        tokens: non-sequence tokens that come in (X).
        summary_tokens: pooled tokens of all streams together (H), read by every expert; may be 0.
        width: width of both.
        spec: the experts.
        activation: of the MLPs.
        dropout: in the MLPs.

    Raises:
        ConfigError: an expert would read no token.
    """

    def __init__(
        self,
        tokens: int,
        summary_tokens: int,
        *,
        width: int,
        spec: ExpertsSpec,
        activation: MlpActivation,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.parts = expert_parts(tokens, spec)
        self.tokens = spec.tokens
        sizes = [len(range(tokens)[part]) + summary_tokens for part in self.parts]
        if min(sizes) == 0:
            raise ConfigError(
                refusal(
                    "ExpertMixture",
                    "experts.count",
                    must=f"be at most the {tokens} tokens of the layer",
                    got=spec.count,
                    fix='use fewer experts or partition = "all"',
                )
            )
        makers = {"wukong": WukongExpert, **EXPERTS}
        self.experts = nn.ModuleList(
            makers[spec.kind(place)](size, width, spec, activation=activation, dropout=dropout)
            for place, size in enumerate(sizes)
        )
        # Where the counts agree the shortcut is the identity, else a linear compression.
        self.shortcut = None
        if spec.residual:
            self.shortcut = (
                nn.Identity() if tokens == self.tokens else TokenLinear(tokens, self.tokens)
            )
        self.norm = RmsNorm(width)
        self._apart = spec.partition != "all"  # each token is read by one expert
        self.run: Callable[[nn.ModuleList, list[Tensor]], Tensor] = sum_of_experts

    def inputs(self, x_BND: Tensor, summary_BPD: Tensor) -> list[Tensor]:
        """Give each expert what it reads; each is a tensor (B, n, D) of its own.

        Args:
            x_BND: the layer's tokens.
            summary_BPD: pooled tokens of all streams.

        Returns:
            one tensor for each expert.
        """
        return [torch.cat([x_BND[:, part], summary_BPD], dim=1) for part in self.parts]

    def forward(self, x_BND: Tensor, summary_BPD: Tensor) -> Tensor:
        """Run all experts.

        Args:
            x_BND: the layer's tokens.
            summary_BPD: pooled tokens of all streams.

        Returns:
            the next layer's tokens (B, fm_tokens + linear_tokens, D).
        """
        if self.shortcut is not None and self._apart and in_halves(x_BND, summary_BPD):
            given, x_BND = inputs_beside(x_BND, summary_BPD, self.parts)
        else:
            given = self.inputs(x_BND, summary_BPD)
        out = self.run(self.experts, given)
        return self.norm(out, before=None if self.shortcut is None else self.shortcut(x_BND))
