"""The mixture of experts over non-sequence tokens: a section of `ModelSpec`. Torch-free."""

from typing import Literal, Self

from pydantic import Field, model_validator

from gem.model.stream_spec import Width
from gem_opkit.contract import Contract

ExpertKind = Literal["wukong", "cross", "dot", "mlp", "attention"]


class ExpertsSpec(Contract):
    """The mixture of experts of a layer; Wukong's by default.

    Every kind gives ``fm_tokens + linear_tokens`` tokens, so that the outputs can be summed.
    """

    count: int = Field(default=2, gt=0, description="experts; their outputs are summed")
    kinds: tuple[ExpertKind, ...] = Field(
        default=("wukong",),
        min_length=1,
        description="one kind for all experts, or one for each: wukong, factorisation block beside "
        "linear compression; cross, DCNv2's cross network; dot, products of all pairs of tokens "
        "through an MLP; mlp, an MLP of all tokens; attention, of tokens to each other",
    )
    partition: Literal["interleaved", "contiguous", "all"] = Field(
        default="interleaved",
        description="which tokens an expert reads beside the pooled summaries: every count-th, "
        "one run of them, or all",
    )
    fm_tokens: int = Field(
        default=8, gt=0, description="n_F, tokens of Wukong's factorisation block"
    )
    linear_tokens: int = Field(default=8, gt=0, description="n_L, tokens of linear compression")
    rank: int = Field(default=8, gt=0, description="k, columns of Y in X (X^T Y)")
    projection: Literal["learned", "attentive"] = Field(
        default="learned", description="Y is a parameter, or made from compressed tokens"
    )
    block_norm: Literal["layer", "swish_rms"] = Field(
        default="layer",
        description="norm of the products of Wukong's factorisation block before its MLP: layer, "
        "LayerNorm; swish_rms, each example's products gated by the sigmoid of their RMSNorm",
    )
    mlp_widths: tuple[Width, ...] = Field(
        default=(128,), description="hidden widths of the MLP of wukong, dot and mlp"
    )
    residual: bool = Field(default=True, description="add the layer's own tokens, compressed")
    cross_layers: int = Field(default=2, gt=0, description="layers of a cross network")
    attention_heads: int = Field(
        default=2, gt=0, description="heads of an attention expert; they divide the width"
    )

    @model_validator(mode="after")
    def _kinds_fit(self) -> Self:
        if len(self.kinds) not in (1, self.count):
            raise ValueError(
                f"kinds must name one kind, or one for each of {self.count} experts; got "
                f"{len(self.kinds)}; change count or kinds"
            )
        return self

    def kind(self, place: int) -> ExpertKind:
        """Return the kind of an expert.

        Args:
            place: which of the experts.

        Returns:
            its kind.
        """
        return self.kinds[place % len(self.kinds)]

    @property
    def tokens(self) -> int:
        """Tokens that the layer gives."""
        return self.fm_tokens + self.linear_tokens
