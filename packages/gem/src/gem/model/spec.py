"""What a model is, before any tensor exists: every published choice is a field of `ModelSpec`.

An ablation is therefore the difference of two recipes. Torch-free, so that a plan can be made
from it. Left out: inputs and targets (`gem.data.schema.BatchSchema`), number formats
(`gem_precision`), and how the model is spread over devices (`gem_parallel`).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from gem_attention.contract import GdpaActivation, Rotary, ScaleRule
from gem_opkit.contract import Contract

MlpActivation = Literal["relu", "gelu", "silu", "identity"]
LayerKind = Literal["interaction", "transformer"]
LeftOut = Annotated[
    tuple[str, ...],
    Field(
        description="inputs that the model does not read: id features and numbers by name, "
        'fields of events as "stream.field"'
    ),
]
Dropout = Annotated[float, Field(ge=0, lt=1, description="share of values set to 0 in training")]
Width = Annotated[int, Field(gt=0)]


class EmbeddingSpec(Contract):
    """The tables, one for each name in the schema; inputs of one table share it."""

    embedding_dim: int = Field(default=32, gt=0, description="width of every table")
    init_std: float = Field(
        default=0.05,
        ge=0,
        description="standard deviation of a fresh row; small, so that an id that was never "
        "trained says little",
    )
    pooling: Literal["sum", "mean"] = Field(
        default="mean", description="how the ids of a multi-valued input become one vector"
    )
    out_of_range: Literal["error", "clamp", "zero"] = Field(
        default="error", description="what a row id outside its table does"
    )
    initial_rows: Literal["in_order", "by_place"] = Field(
        default="in_order",
        description="how fresh rows are drawn: in_order, one after another by the generator of all "
        "weights; by_place, each number by seed, table, row and column alone, as tables that are "
        "sharded over ranks have to",
    )


class NumbersSpec(Contract):
    """How the continuous inputs of an example reach the model; each way can be used alone."""

    tokens: int = Field(
        default=1, ge=0, description="tokens that one linear map makes of all numbers together"
    )
    buckets: int = Field(
        default=0,
        ge=0,
        description="knots of a piecewise linear embedding, which makes one token of each "
        "number; 0 for none, else at least 2",
    )
    bucket_low: float = Field(default=-3.0, description="number at the first knot")
    bucket_high: float = Field(default=3.0, description="number at the last knot")
    trunk: bool = Field(default=True, description="the heads' trunk reads the numbers as they are")
    shortcut: bool = Field(default=True, description="linear map from the numbers to the logits")
    shortcut_gain: float = Field(
        default=1.0,
        gt=0,
        description="factor behind that map; under Adam it multiplies the map's learning rate",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.buckets == 1:
            raise ValueError("buckets must be 0 or at least 2; got 1; one knot is a constant")
        if self.bucket_low >= self.bucket_high:
            raise ValueError(
                f"bucket_low must be below bucket_high; got {self.bucket_low} and "
                f"{self.bucket_high}; swap them"
            )
        return self


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
    summary_tokens: int = Field(default=4, ge=0, description="tokens of hierarchical seed pooling")
    seeds: int = Field(default=8, gt=0, description="learned queries of seed pooling")
    kron_rank: int = Field(default=2, gt=0, description="terms of the sum of Kronecker products")
    target_tokens: int = Field(
        default=1,
        ge=0,
        description="pooled tokens whose queries are made from the candidate; 0 for none",
    )
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
    gdpa_activation: GdpaActivation | tuple[GdpaActivation, ...] = Field(
        default="gelu", description="in place of softmax; one name, or one for each head"
    )
    gdpa_scale: ScaleRule = Field(
        default="inverse_max_tokens", description="factor of the scores of GDPA"
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
        if self.layers != () and self.summary_tokens + self.target_tokens == 0:
            raise ValueError(
                "summary_tokens + target_tokens must be at least 1; got 0; "
                "set layers = [] to leave the stream out"
            )
        return self


class ExpertsSpec(Contract):
    """The mixture of Wukong experts of a layer."""

    count: int = Field(default=2, gt=0, description="experts; their outputs are summed")
    partition: Literal["interleaved", "contiguous", "all"] = Field(
        default="interleaved",
        description="which tokens an expert reads beside the pooled summaries: every count-th, "
        "one run of them, or all",
    )
    fm_tokens: int = Field(default=8, gt=0, description="n_F, tokens of the factorisation block")
    linear_tokens: int = Field(default=8, gt=0, description="n_L, tokens of linear compression")
    rank: int = Field(default=8, gt=0, description="k, columns of Y in X (X^T Y)")
    projection: Literal["learned", "attentive"] = Field(
        default="learned", description="Y is a parameter, or made from compressed tokens"
    )
    mlp_widths: tuple[Width, ...] = Field(
        default=(128,), description="hidden widths of the factorisation block's MLP"
    )
    residual: bool = Field(default=True, description="add the layer's own tokens, compressed")


class HeadsSpec(Contract):
    """From the last tokens to one logit a task."""

    trunk_widths: tuple[Width, ...] = Field(default=(128, 64), description="shared MLP")
    task_widths: tuple[Width, ...] = Field(default=(), description="MLP of each task above it")
    domain_outputs: bool = Field(
        default=True, description="every domain has its own last layer, else all share one"
    )
    init_gain: float = Field(
        default=0.0,
        ge=0,
        description="standard deviation of the first logits around their offset, for trunk "
        "outputs of unit variance; 0 starts from the offset and the shortcut alone",
    )
    base_rates: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(
        default_factory=dict,
        description="task -> positive rate that the offset of the logit starts at; 0.5 if absent",
    )
    task_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, description="task -> weight of its loss; 1 if absent"
    )
    dropout: Dropout = 0.0


class GemSpec(Contract):
    """The hybrid model: event streams and non-sequence tokens that inform each other.

    Source: Kunlun (arXiv:2602.10016) and InterFormer (arXiv:2411.09852) for the layers, Wukong
    (arXiv:2403.02545) for the experts.
    """

    kind: Literal["gem"] = "gem"
    width: Width = Field(default=64, description="width of a non-sequence token")
    layers: tuple[LayerKind, ...] = Field(
        default=("interaction", "transformer", "interaction"),
        min_length=1,
        description="interaction: GDPA-PFFN and a fresh summary of every stream; transformer: "
        "self-attention, the summary is used again; both run the experts",
    )
    summary_tokens: int = Field(
        default=4, gt=0, description="n_sum, tokens of the non-sequence summary"
    )
    summary_hidden: Width = Field(default=64, description="hidden width of the summary's MLP")
    transformer_gate: bool = Field(
        default=True, description="transformer layers gate their tokens by the summary"
    )
    leave_out: LeftOut = ()
    embeddings: EmbeddingSpec = EmbeddingSpec()
    numbers: NumbersSpec = NumbersSpec()
    stream: StreamSpec = Field(default=StreamSpec(), description="settings of every stream")
    streams: dict[str, StreamSpec] = Field(
        default_factory=dict,
        description="stream -> settings; fields that are not named are those of `stream`",
    )
    experts: ExpertsSpec = ExpertsSpec()
    heads: HeadsSpec = HeadsSpec()
    token_norm: bool = Field(default=False, description="normalise tokens before the first layer")
    activation: MlpActivation = Field(default="relu", description="of every MLP")
    dropout: Dropout = Field(
        default=0.0, description="on tokens before the first layer, and in the experts' MLPs"
    )
    token_dropout: Dropout = Field(
        default=0.0, description="whole id tokens, each for a share of the examples"
    )

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, data: Any) -> Any:
        """Fill a named stream's missing fields from `stream`."""
        if not isinstance(data, dict) or not isinstance(data.get("streams"), dict):
            return data
        shared = data.get("stream", {})
        shared = shared.model_dump() if isinstance(shared, StreamSpec) else shared
        if not isinstance(shared, dict):
            return data
        own = {
            name: {**shared, **value} if isinstance(value, dict) else value
            for name, value in data["streams"].items()
        }
        return {**data, "streams": own}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, stream in [("stream", self.stream), *self.streams.items()]:
            indices = range(len(self.layers)) if stream.layers is None else stream.layers
            if not indices:
                continue
            if indices[-1] >= len(self.layers) or indices[0] < 0:
                raise ValueError(
                    f"{name}.layers must index the {len(self.layers)} layers of the model; got "
                    f"{stream.layers}; use 0 to {len(self.layers) - 1}"
                )
            if self.layers[indices[-1]] != "interaction":
                raise ValueError(
                    f"{name}: its last layer must be an interaction layer; got layer "
                    f"{indices[-1]}, a transformer layer; nothing would read its events"
                )
            taken = [i for i in indices if self.layers[i] == "transformer"]
            if set(stream.full_layers) - set(taken):
                raise ValueError(
                    f"{name}.full_layers must name transformer layers that the stream takes part "
                    f"in, {', '.join(map(str, taken)) or 'of which there is none'}; got "
                    f"{stream.full_layers}; leave the others out"
                )
        return self

    def stream_spec(self, name: str) -> StreamSpec:
        """Return the settings of a stream.

        Args:
            name: the stream's name in the schema.

        Returns:
            its own settings, or those of every stream.
        """
        return self.streams.get(name, self.stream)

    def layer_stream_spec(self, name: str, index: int) -> StreamSpec:
        """Return the settings of a stream in one layer.

        Args:
            name: the stream's name in the schema.
            index: which layer.

        Returns:
            its settings, with the pattern "full" where the layer is one of its full layers.
        """
        own = self.stream_spec(name)
        return own.model_copy(update={"pattern": "full"}) if index in own.full_layers else own


class DinSpec(Contract):
    """Deep Interest Network, the plain model to compare with.

    Source: Zhou et al. 2018 (arXiv:1706.06978).
    """

    kind: Literal["din"] = "din"
    width: Width = Field(default=32, description="width of an event and of the candidate")
    attention_widths: tuple[Width, ...] = Field(
        default=(64, 32), description="hidden widths of the attention's MLP"
    )
    leave_out: LeftOut = ()
    embeddings: EmbeddingSpec = EmbeddingSpec()
    shortcut: bool = Field(default=False, description="linear map from the numbers to the logits")
    shortcut_gain: float = Field(
        default=1.0,
        gt=0,
        description="factor behind that map; under Adam it multiplies the map's learning rate",
    )
    gap_buckets: int = Field(
        default=8, ge=0, description="knots of the embedding of the log time gap; 0 for none"
    )
    pooling: Literal["sum", "mean"] = Field(
        default="sum", description="how the weighted events of a history become one vector"
    )
    heads: HeadsSpec = HeadsSpec(trunk_widths=(256, 128, 64))
    activation: MlpActivation = Field(default="relu", description="of every MLP")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gap_buckets == 1:
            raise ValueError("gap_buckets must be 0 or at least 2; got 1; one knot is a constant")
        return self


ModelSpec = Annotated[GemSpec | DinSpec, Field(discriminator="kind")]
