"""What a model is, before any tensor exists: every published choice is a field of `ModelSpec`.

An ablation is therefore the difference of two recipes. Torch-free, so that a plan can be made
from it. Left out: inputs and targets (`gem.data.schema.BatchSchema`), number formats
(`gem_precision`), and how the model is spread over devices (`gem_parallel`).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from gem.model.expert_spec import ExpertsSpec
from gem.model.stream_spec import Dropout, StreamSpec, Width
from gem.model.transfer_spec import DistillationSpec, UserModelSpec
from gem_opkit.contract import Contract

MlpActivation = Literal["relu", "gelu", "silu", "identity"]
LayerKind = Literal["interaction", "transformer", "both"]
LeftOut = Annotated[
    tuple[str, ...],
    Field(
        description="inputs that the model does not read: id features and numbers by name, "
        'fields of events as "stream.field"; a star stands for any characters, as in "content_*"'
    ),
]


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
    shortcut_rule: Literal["gradient", "newton"] = Field(
        default="gradient",
        description="how that map learns: gradient, as the rest does; newton, by the curvature of "
        "all rows so far, which one pass brings near its optimum; on one rank",
    )
    shortcut_prior: float = Field(
        default=0.03,
        gt=0,
        le=1e6,
        description="newton: variance of a weight of the map before the first row; less holds it "
        "back for longer",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shortcut_rule == "newton" and not self.shortcut:
            raise ValueError(
                'shortcut_rule must be "gradient" without a shortcut; got "newton"; set shortcut'
            )
        # A resolved recipe names every key: only another value than the default says something.
        default = type(self).model_fields["shortcut_prior"].default
        if self.shortcut_rule != "newton" and self.shortcut_prior != default:
            raise ValueError(
                f'shortcut_prior must come with shortcut_rule = "newton"; got '
                f'{self.shortcut_prior} with "{self.shortcut_rule}"; set the rule, or leave it out'
            )
        if self.buckets == 1:
            raise ValueError("buckets must be 0 or at least 2; got 1; one knot is a constant")
        if self.bucket_low >= self.bucket_high:
            raise ValueError(
                f"bucket_low must be below bucket_high; got {self.bucket_low} and "
                f"{self.bucket_high}; swap them"
            )
        return self


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
        "self-attention, the summary is used again; both: one after the other, without the saving "
        "of alternating layers; each of them runs the experts",
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
    user_model: UserModelSpec | None = Field(
        default=None,
        description="make it an upstream model of users, whose layers see no candidate and whose "
        "embeddings other models read",
    )
    distillation: DistillationSpec | None = Field(
        default=None, description="learn from the teacher that data.teacher names as well"
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
    def _one_kind_of_transfer(self) -> Self:
        if self.user_model is None:
            return self
        if self.distillation is not None:
            raise ValueError(
                "distillation must be left out of a model of users; got both sections; distil "
                "into the model that reads its embeddings"
            )
        for name, stream in [("stream", self.stream), *self.streams.items()]:
            if stream.layers != () and stream.target_tokens:
                raise ValueError(
                    f"{name}.target_tokens must be 0 in a model of users, whose layers see no "
                    f"candidate; got {stream.target_tokens}; set it to 0"
                )
        return self

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
            if self.layers[indices[-1]] == "transformer":
                raise ValueError(
                    f"{name}: its last layer must be an interaction layer; got layer "
                    f"{indices[-1]}, a transformer layer; nothing would read its events"
                )
            taken = [i for i in indices if self.layers[i] != "interaction"]
            if set(stream.full_layers) - set(taken):
                raise ValueError(
                    f"{name}.full_layers must name transformer layers that the stream takes part "
                    f"in, {', '.join(map(str, taken)) or 'of which there is none'}; got "
                    f"{stream.full_layers}; leave the others out"
                )
        heads = self.experts.attention_heads
        if "attention" in self.experts.kinds and self.width % heads:
            raise ValueError(
                f"experts.attention_heads must divide width; got {heads} and width={self.width}; "
                "change one of them"
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
