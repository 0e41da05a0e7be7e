"""Layers that pool each sequence into a few tokens; ``gem_attention.layers`` has their names."""

import torch
from torch import Tensor, nn

from gem_attention.contract import AttentionSpec
from gem_attention.ops import pooled_attention
from gem_attention.projected import (
    attend,
    check_batch,
    check_full,
    constant_layout,
    split_keys_and_values,
)
from gem_jagged.batch import Layout
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ConfigError, refusal
from gem_precision.beside import project_beside
from gem_precision.layers import Projection, RmsNorm
from gem_precision.norms import rms_normalize


class PooledAttention(nn.Module):
    """A few queries pool each sequence: learned seeds, or queries that come with the example.

    Args:
        model_width: width D of the tokens and of the result, above 0.
        spec: pattern full, no rotation.
        seeds: learned queries, shared by the batch; 0 if the queries come with each call.

    Raises:
        ConfigError: another pattern, a rotation, or a negative number of seeds.

    Source: Lee et al. 2019 (arXiv:1810.00825).
    """

    def __init__(self, model_width: int, spec: AttentionSpec, seeds: int) -> None:
        super().__init__()
        check_full("PooledAttention", spec)
        if seeds < 0:
            raise ConfigError(
                refusal("PooledAttention", "seeds", must="be at least 0", got=seeds, fix="count")
            )
        self.spec = spec
        self.seeds_PD = nn.Parameter(torch.randn(seeds, model_width)) if seeds else None
        self.norm = RmsNorm(model_width)
        self.q = Projection(model_width, spec.heads * spec.head_dim)
        self.kv = Projection(model_width, 2 * spec.key_heads * spec.head_dim)
        self.out = Projection(spec.heads * spec.head_dim, model_width)

    def forward(self, x_TD: Tensor, layout: Layout, *, query_BPD: Tensor | None = None) -> Tensor:
        """Pool each sequence.

        Args:
            x_TD: tokens.
            layout: where each sequence begins.
            query_BPD: queries of each sequence's example (target-aware pooling); None for the
                learned seeds. Normalised like them.

        Returns:
            pooled_BPD; 0 for an empty sequence.

        Raises:
            ShapeError: tokens or queries that do not fit the layout or the layer.
            ConfigError: queries for a layer that has seeds, or none for one that has not.
        """
        check_shapes("PooledAttention", x_TD=x_TD, query_BPD=query_BPD)
        return self._pooled(self.kv(x_TD), layout, query_BPD)

    def beside(self, x_TD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Pool tokens that are also passed on, with the learned seeds.

        Args:
            x_TD: as in ``forward``.
            layout: as there.

        Returns:
            pooled_BPD, and the tokens for one other use of them: on a GPU in bf16 the gradients of
            both add up in the product that writes one of them, over the other
            (``gem_precision.beside``).
        """
        check_shapes("PooledAttention", x_TD=x_TD)
        kv_TF, x_TD = project_beside(self.kv, x_TD)
        return self._pooled(kv_TF, layout, None), x_TD

    def _pooled(self, kv_TF: Tensor, layout: Layout, query_BPD: Tensor | None) -> Tensor:
        spec = self.spec
        k_SGK, v_SGV = split_keys_and_values(spec, kv_TF, layout)
        source = self.seeds_PD if query_BPD is None else query_BPD
        if source is None or (query_BPD is not None and self.seeds_PD is not None):
            raise ConfigError(
                refusal(
                    "PooledAttention",
                    "query_BPD",
                    must="be given if the layer has no seeds, and only then",
                    got=f"{'none' if query_BPD is None else 'queries'} with "
                    f"{0 if self.seeds_PD is None else self.seeds_PD.shape[0]} seeds",
                    fix="build the layer with seeds=0 to bring queries",
                )
            )
        q = self.q(self.norm(source))
        # Spelled out: -1 cannot be told where an empty batch leaves no elements.
        q = q.view(q.numel() // self.q.out_features, spec.heads, spec.head_dim)
        if spec.qk_norm:
            q = rms_normalize(q)
        if query_BPD is None:
            out_BPHV = pooled_attention(
                q, k_SGK, v_SGV, layout, activation=spec.activation, scale=spec.score_scale
            )
        else:
            batch, count, _ = query_BPD.shape
            check_batch("PooledAttention", "query_BPD", batch, layout)
            q_layout = constant_layout(batch, count, layout)
            pairs = count * layout.total_tokens
            out_THV = attend(spec, q, k_SGK, v_SGV, q_layout, layout, pairs)
            out_BPHV = out_THV.view(batch, count, spec.heads, spec.head_dim)
        return self.out(out_BPHV.flatten(2))


class SumKronLinear(nn.Module):
    """A sum of Kronecker products: mixes tokens and columns with few parameters.

        Y_b = Σ_i Z_iᵀ H_b W_i,   Z_i (tokens_in, tokens_out), W_i (D, D), i = 1 … rank

    Args:
        tokens_in: tokens of each example, above 0.
        tokens_out: tokens of the result, above 0.
        width: width D, above 0.
        rank: number of products, above 0.

    Source: the Kunlun article.
    """

    def __init__(self, tokens_in: int, tokens_out: int, width: int, rank: int) -> None:
        super().__init__()
        for name, value in (
            ("tokens_in", tokens_in),
            ("tokens_out", tokens_out),
            ("width", width),
            ("rank", rank),
        ):
            if value <= 0:
                raise ConfigError(
                    refusal("SumKronLinear", name, must="be above 0", got=value, fix="raise it")
                )
        self.tokens_out, self.rank = tokens_out, rank
        # Rows of Z are all (i, output token), rows of W all (i, input column); with this spread
        # the result has the variance of the input.
        self.z = nn.Parameter(torch.randn(rank * tokens_out, tokens_in) * tokens_in**-0.5)
        self.w = nn.Parameter(torch.randn(rank * width, width) * (rank * width) ** -0.5)

    def forward(self, h_BPD: Tensor) -> Tensor:
        """Mix tokens and columns.

        Args:
            h_BPD: tokens_in tokens of each example.

        Returns:
            y_BPD with tokens_out tokens.

        Raises:
            ShapeError: h_BPD has another number of dims.
        """
        check_shapes("SumKronLinear", h_BPD=h_BPD)
        batch, _, width = h_BPD.shape
        if h_BPD.is_cuda:
            return self.without_copies(h_BPD)
        mixed = torch.matmul(self.z, h_BPD).view(batch, self.rank, self.tokens_out, width)
        rows = mixed.transpose(1, 2).reshape(batch, self.tokens_out, self.rank * width)
        return torch.matmul(rows, self.w)

    def without_copies(self, h_BPD: Tensor) -> Tensor:
        """Mix tokens and columns, with nothing of the size of h copied forward or backward.

        Rows of Z sorted by output token give what the second product reads, and a batched product
        takes h as it lies.

        Args:
            h_BPD: tokens_in tokens of each example.

        Returns:
            y_BPD with tokens_out tokens.
        """
        batch, _, width = h_BPD.shape
        # Cast before it is broadcast: autocast would cast what each example reads.
        z = self.z.to(h_BPD.dtype).unflatten(0, (self.rank, self.tokens_out))
        z = z.transpose(0, 1).flatten(0, 1)
        mixed = torch.bmm(z.expand(batch, -1, -1), h_BPD)
        return torch.matmul(mixed.view(batch, self.tokens_out, self.rank * width), self.w)


class HierarchicalSeedPooling(nn.Module):
    """Pools each sequence with many seeds, then compresses them into a few tokens.

        H = MHA(RmsNorm(E), S, S)      Y = SumKronLinear(H)

    Args:
        model_width: width D of the tokens and of the result, above 0.
        spec: pattern full, no rotation.
        seeds: learned queries E, shared by the batch, above 0; more than ``tokens`` is usual.
        tokens: tokens of the result, above 0.
        kron_rank: number of Kronecker products, above 0.

    Raises:
        ConfigError: a number that is not above 0, another pattern or a rotation.

    Source: the Kunlun article.
    """

    def __init__(
        self, model_width: int, spec: AttentionSpec, seeds: int, tokens: int, kron_rank: int
    ) -> None:
        super().__init__()
        self.pool = PooledAttention(model_width, spec, seeds)
        self.compress = SumKronLinear(seeds, tokens, model_width, kron_rank)

    def forward(self, x_TD: Tensor, layout: Layout) -> Tensor:
        """Summarise each sequence.

        Args:
            x_TD: tokens.
            layout: where each sequence begins.

        Returns:
            tokens_BPD; 0 for an empty sequence.

        Raises:
            ShapeError: tokens that do not fit the layout or the layer.
        """
        return self.compress(self.pool(x_TD, layout))

    def beside(self, x_TD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Summarise sequences whose tokens are also passed on.

        Args:
            x_TD: tokens.
            layout: where each sequence begins.

        Returns:
            tokens_BPD, and x_TD as ``PooledAttention.beside`` gives it.
        """
        pooled_BPD, x_TD = self.pool.beside(x_TD, layout)
        return self.compress(pooled_BPD), x_TD
