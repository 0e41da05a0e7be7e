"""How one event stream is read: a section of `ModelSpec`. Torch-free."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gem_attention.contract import GdpaActivation, Rotary, ScaleRule
from gem_opkit.contract import Contract

Width = Annotated[int, Field(gt=0)]
Dropout = Annotated[float, Field(ge=0, lt=1, description="share of values set to 0 in training")]
SummaryPooling = Literal["hsp", "pma", "mean"]


class StreamSpec(Contract):
    """One event stream; each stream has settings of its own (event-level personalisation)."""

    width: Width = Field(default=64, description="width of an event token")
    heads: int = Field(default=2, gt=0, description="attention heads; they divide the width")
    layers: tuple[int, ...] | None = Field(
        default=None,
        description="indices of the model's layers that the stream takes part in; None for all, "
        "() leaves the stream out; elsewhere its last summary is used again",
    )
    max_events: int | None = Field(
        default=None, gt=0, description="latest events that are used; None for all in the batch"
    )
    ffn: Literal["gdpa", "none"] = Field(
        default="gdpa",
        description="what an interaction layer does to the events before it pools them: gdpa, they "
        "read the non-sequence summary without softmax (GDPA-PFFN); none, nothing",
    )
    pooling: SummaryPooling = Field(
        default="hsp",
        description="how events become summary tokens: hsp, hierarchical seed pooling; pma, one "
        "learned query a token with an MLP behind it; mean, a linear map of their mean",
    )
    summary_tokens: int = Field(default=4, ge=0, description="tokens that the pooling gives")
    seeds: int = Field(default=8, gt=0, description="learned queries of hsp")
    kron_rank: int = Field(
        default=2, gt=0, description="terms of the sum of Kronecker products of hsp"
    )
    recent_tokens: int = Field(
        default=0, ge=0, description="latest events that become summary tokens as they are"
    )
    target_tokens: int = Field(
        default=1,
        ge=0,
        description="pooled tokens whose queries are made from the candidate; 0 for none",
    )
    target_attention: Literal["softmax", "din"] = Field(
        default="softmax",
        description="how those tokens read the events: softmax attention, or the weights of DIN, "
        "which an MLP makes of event and candidate and nothing normalises",
    )
    target_hidden: Width = Field(default=32, description="hidden width of the MLP of din")
    pattern: Literal["window", "block", "full"] = Field(
        default="window", description="which events self-attention sees"
    )
    full_layers: tuple[int, ...] = Field(
        default=(),
        description="indices of transformer layers whose self-attention sees all events, whatever "
        "the pattern of the others",
    )
    window_tokens: int = Field(default=32, gt=0, description="events seen on each side: window")
    block_tokens: int = Field(default=64, gt=0, description="events of a block: block")
    ffn_hidden: int = Field(
        default=0,
        ge=0,
        description="hidden width of an MLP of each event behind self-attention; 0 for none",
    )
    gdpa_activation: GdpaActivation | tuple[GdpaActivation, ...] = Field(
        default="gelu", description="in place of softmax; one name, or one for each head"
    )
    gdpa_scale: ScaleRule = Field(
        default="inverse_max_tokens", description="factor of the scores of GDPA"
    )
    gdpa_impl: Literal["auto", "reference", "triton"] = Field(
        default="auto",
        description="who computes GDPA-PFFN: triton, its norms, attention and residuals as one "
        "operator, refused where the kernels do not run; reference, one operator after the other; "
        "auto, the former where a GPU's kernels take it",
    )
    qk_norm: bool = Field(default=True, description="normalise q and k of every head")
    rotary: Rotary = Field(default="rote", description="rotation of q and k in self-attention")
    rote_time_scale_s: float = Field(
        default=60.0, gt=0, description="t of the angle log(1 + gap / t), seconds"
    )
    gap_buckets: int = Field(
        default=8, ge=0, description="knots of the embedding of the log time gap; 0 for none"
    )
    token_hidden: int = Field(
        default=0, ge=0, description="hidden width of the event's MLP; 0 for one linear map"
    )
    dropout: Dropout = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"heads must divide width; got heads={self.heads} and width={self.width}; "
                f"choose width as a multiple"
            )
        if self.rotary != "none" and (self.width // self.heads) % 2:
            raise ValueError(
                f"width / heads must be even under rotary; got {self.width // self.heads}; "
                f'change width or set rotary = "none"'
            )
        if isinstance(self.gdpa_activation, tuple) and len(self.gdpa_activation) != self.heads:
            raise ValueError(
                f"gdpa_activation must name one activation for each of {self.heads} heads; "
                f"got {len(self.gdpa_activation)}; give one name for all of them"
            )
        if self.gap_buckets == 1:
            raise ValueError("gap_buckets must be 0 or at least 2; got 1; one knot is a constant")
        if self.layers is not None and list(self.layers) != sorted(set(self.layers)):
            raise ValueError(
                f"layers must be rising indices; got {self.layers}; sort them, each once"
            )
        if self.layers != () and self.tokens == 0:
            raise ValueError(
                "summary_tokens + recent_tokens + target_tokens must be at least 1; got 0; "
                "set layers = [] to leave the stream out"
            )
        if self.target_attention == "din" and self.target_tokens > 1:
            raise ValueError(
                f'target_tokens must be at most 1 under target_attention = "din"; got '
                f"{self.target_tokens}; DIN has one weight an event"
            )
        return self

    @property
    def tokens(self) -> int:
        """Pooled tokens of the stream: of the pooling, latest events, those of the candidate."""
        return self.summary_tokens + self.recent_tokens + self.target_tokens
