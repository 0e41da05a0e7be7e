"""What an attention layer is: its pattern, activation, heads and positions. Torch-free."""

from typing import Literal

from pydantic import Field, model_validator

from gem_opkit.contract import Contract

Pattern = Literal["full", "causal", "window", "block"]
GdpaActivation = Literal[
    "gelu",
    "fast_gelu",
    "taylor_gelu",
    "relu",
    "relu_squared",
    "leaky_relu",
    "silu",
    "hard_swish",
    "identity",
]
Rotary = Literal["none", "position", "rote"]
ScaleRule = Literal["inverse_sqrt_width", "inverse_max_tokens"]


class AttentionSpec(Contract):
    """One attention layer, whatever its inputs.

    The words of ``pattern`` are defined by the masks of ``gem_attention.patterns``.
    """

    pattern: Pattern = Field(default="full", description="which keys of its sequence a query sees")
    window_tokens: int | None = Field(
        default=None, ge=0, description="keys visible on each side; for pattern window only"
    )
    block_tokens: int = Field(
        default=64, gt=0, description="length of a block; used by pattern block only"
    )
    activation: Literal["softmax"] | GdpaActivation | tuple[GdpaActivation, ...] = Field(
        default="softmax",
        description="softmax, or an elementwise activation in its place, or one of these a head",
    )
    heads: int = Field(gt=0, description="query heads")
    kv_heads: int | None = Field(
        default=None, gt=0, description="key/value heads, a divisor of heads; None for heads"
    )
    head_dim: int = Field(gt=0, description="width of one head")
    qk_norm: bool = Field(
        default=True, description="divide each head of queries and keys by its root mean square"
    )
    rotary: Rotary = Field(
        default="none",
        description="rotate queries and keys by position, or by position and log time gap (rote)",
    )
    rote_time_scale_s: float = Field(
        default=60.0, gt=0, description="seconds below which a time gap hardly turns; rote only"
    )
    scale: ScaleRule = Field(
        default="inverse_sqrt_width",
        description="scores are divided by the root of head_dim, or by max_tokens",
    )
    max_tokens: int | None = Field(
        default=None, gt=0, description="longest sequence; for scale inverse_max_tokens only"
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> "AttentionSpec":
        if (self.pattern == "window") != (self.window_tokens is not None):
            raise ValueError(
                f"AttentionSpec: window_tokens must be given with pattern 'window' and only then; "
                f"got {self.window_tokens} with {self.pattern!r}; change one of the two"
            )
        if (self.scale == "inverse_max_tokens") != (self.max_tokens is not None):
            raise ValueError(
                f"AttentionSpec: max_tokens must be given with scale 'inverse_max_tokens' and "
                f"only then; got {self.max_tokens} with {self.scale!r}; change one of the two"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"AttentionSpec: kv_heads must divide heads; got kv_heads={self.kv_heads} and "
                f"heads={self.heads}; use a divisor"
            )
        if isinstance(self.activation, tuple) and len(self.activation) != self.heads:
            raise ValueError(
                f"AttentionSpec: activation must name one activation a head; got "
                f"{len(self.activation)} for heads={self.heads}; give one name for all or one each"
            )
        if self.rotary != "none" and self.head_dim % 2:
            raise ValueError(
                f"AttentionSpec: head_dim must be even with rotary {self.rotary!r}; got "
                f"{self.head_dim}; pairs of columns are rotated"
            )
        return self

    @property
    def key_heads(self) -> int:
        """Key/value heads, with the default filled in."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def score_scale(self) -> float:
        """Factor of the scores by the scale rule."""
        return self.head_dim**-0.5 if self.max_tokens is None else 1.0 / self.max_tokens

    @property
    def window(self) -> tuple[int | None, int | None]:
        """Keys visible left and right of a query's place; None for all."""
        return (None, 0) if self.pattern == "causal" else (self.window_tokens, self.window_tokens)
