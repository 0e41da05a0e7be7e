"""FLOPs that a training step needs, from plain integers: what every efficiency figure rests on.

Counted are the products of the forward and of the backward, of valid tokens and of pairs that
see each other, a multiply-add as 2. Lookups, norms, activations, losses and the optimizer count
0, and so does everything that is computed again. Torch-free, so that a plan can be made from it;
a test holds it to torch's own counter over the real modules.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from gem.data.schema import BatchSchema, StreamInput
from gem.model.expert_spec import ExpertsSpec
from gem.model.spec import DinSpec, GemSpec, HeadsSpec
from gem.model.stream_spec import StreamSpec
from gem.model.structure import (
    expert_parts,
    feature_tokens,
    head_width,
    pair_count,
    pooled_tokens,
    reads_summary,
    reduce_schema,
    streams_read,
    takes_part,
    user_side,
)
from gem.model.transfer_spec import DistillationSpec, UserModelSpec
from gem_attention.costs import (
    block_attention_backward_cost,
    block_attention_cost,
    block_pairs_in_sequence,
    generalized_attention_backward_cost,
    generalized_attention_cost,
    jagged_flash_attention_backward_cost,
    jagged_flash_attention_cost,
    pooled_attention_backward_cost,
    pooled_attention_cost,
    visible_pairs_in_sequence,
)
from gem_jagged.costs import jagged_mean_backward_cost, jagged_mean_cost
from gem_opkit.cost import Cost

if TYPE_CHECKING:
    from gem.data.batch import ExampleBatch


@dataclass(frozen=True, slots=True)
class PassFlops:
    """FLOPs of a forward and of its backward.

    Attributes:
        forward: of the forward.
        backward: of the backward, without anything that is computed again.
    """

    forward: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        """FLOPs of a training step."""
        return self.forward + self.backward

    def __add__(self, other: "PassFlops") -> "PassFlops":
        """Add both parts."""
        return PassFlops(self.forward + other.forward, self.backward + other.backward)


def batch_flops(spec: GemSpec | DinSpec, schema: BatchSchema, batch: "ExampleBatch") -> PassFlops:
    """Count the FLOPs of a training step on a batch, from its host lengths.

    Args:
        spec: the model.
        schema: all inputs of the data set.
        batch: examples; no tensor of it is read on a device.

    Returns:
        FLOPs of all its examples together.
    """
    lengths = {name: s.numbers.lengths.tolist() for name, s in batch.streams.items()}
    parts = training_flops(spec, schema, examples=batch.examples, lengths=lengths)
    return total_flops(parts.values())


def total_flops(parts: Iterable[PassFlops]) -> PassFlops:
    """Add up.

    Args:
        parts: any number of counts.

    Returns:
        their sum.
    """
    return sum(parts, PassFlops())


def training_flops(
    spec: GemSpec | DinSpec,
    schema: BatchSchema,
    *,
    examples: int,
    lengths: Mapping[str, Sequence[int]],
) -> dict[str, PassFlops]:
    """Count the FLOPs of a training step, part by part.

    Args:
        spec: the model.
        schema: all inputs of the data set.
        examples: examples of the step.
        lengths: stream -> events of each example, for every stream that the model reads.

    Returns:
        qualified name of a submodule -> its FLOPs; nothing is counted twice.
    """
    schema = reduce_schema(schema, spec.leave_out)
    if isinstance(spec, GemSpec):
        return _gem(spec, schema, examples, lengths)
    return _din(spec, schema, examples, lengths)


def _linear(rows: int, inputs: int, outputs: int, *, input_gradient: bool = True) -> PassFlops:
    """A product with a weight; its input needs no gradient where it is data."""
    forward = 2 * rows * inputs * outputs
    return PassFlops(forward, forward * (2 if input_gradient else 1))


def _mlp(rows: int, widths: Sequence[int], *, input_gradient: bool = True) -> PassFlops:
    total = PassFlops()
    for place, (inputs, outputs) in enumerate(pairwise(widths)):
        needed = input_gradient or place > 0
        total += _linear(rows, inputs, outputs, input_gradient=needed)
    return total


def _gem(
    spec: GemSpec, schema: BatchSchema, examples: int, lengths: Mapping[str, Sequence[int]]
) -> dict[str, PassFlops]:
    streams = streams_read(spec, schema)
    lengths = {
        stream.name: _latest(lengths[stream.name], spec.stream_spec(stream.name).max_events)
        for stream in streams
    }
    own_inputs = schema if spec.user_model is None else user_side(schema)
    parts = {"features": _features(spec, own_inputs, examples)}
    for stream in streams:
        own = spec.stream_spec(stream.name)
        parts[f"events.stream_{stream.name}"] = _events(
            stream,
            sum(lengths[stream.name]),
            width=own.width,
            embedding_dim=spec.embeddings.embedding_dim,
            gap_buckets=own.gap_buckets,
            hidden=own.token_hidden,
        )
    tokens = feature_tokens(spec, own_inputs)
    for index, kind in enumerate(spec.layers):
        layer = f"layers.{index}"
        taking_part = [s for s in streams if takes_part(spec, s.name, index)]
        if reads_summary(spec, streams, index):
            parts[f"{layer}.summary"] = _linear(
                examples * spec.width, tokens, spec.summary_tokens
            ) + _mlp(examples * spec.summary_tokens, (spec.width, spec.summary_hidden, spec.width))
        for stream in taking_part:
            own, events = spec.layer_stream_spec(stream.name, index), lengths[stream.name]
            total = PassFlops()
            if kind != "interaction":
                gated = spec.transformer_gate and kind == "transformer"
                total += _transformer(spec, own, examples, events, gated=gated)
            if kind != "transformer":
                total += _interaction(spec, own, examples, events)
            parts[f"{layer}.streams.stream_{stream.name}"] = total
        pooled = pooled_tokens(spec, streams, index)
        parts[f"{layer}.experts"] = experts_flops(
            spec.experts, spec.width, examples, tokens=tokens, summary_tokens=pooled
        )
        tokens = spec.experts.tokens
    width = head_width(spec, own_inputs, streams)
    if spec.user_model is not None:
        parts["heads"] = _user_heads(spec, spec.user_model, schema, examples, width)
        return parts
    parts["heads"] = _heads(spec.heads, schema, examples, width)
    if spec.distillation is not None:
        parts["distillation"] = _distillation(spec.distillation, schema, examples, width)
    if spec.numbers.shortcut:
        parts["shortcut"] = _shortcut(schema, examples)
    return parts


def _user_heads(
    spec: GemSpec, own: UserModelSpec, schema: BatchSchema, examples: int, width: int
) -> PassFlops:
    """Heads of a model of users, and what else their vectors are trained by."""
    tasks, embedding = len(schema.labels), spec.embeddings.embedding_dim
    candidate = [source.name for source in schema.ids if source.name not in schema.of_user]
    items = sum(name in schema.of_item for name in candidate)
    total = _mlp(examples, (width, *spec.heads.trunk_widths, own.width))
    widths = (len(candidate) * embedding, own.candidate_hidden, tasks * (own.width + 1))
    total += _mlp(examples, widths)
    total += _linear(examples, own.width, tasks)  # the product with the candidate
    total += _linear(examples, items * embedding, own.width)
    total += _linear(examples, own.width, examples)  # every user with every item of the batch
    return total + _linear(examples, own.width, own.time_gap_knots)


def _distillation(
    own: DistillationSpec, schema: BatchSchema, examples: int, width: int
) -> PassFlops:
    tasks, hidden = len(schema.labels), own.adapter_hidden
    total = _mlp(examples, (width, *own.hidden_widths, tasks))
    if own.adapter:
        total += _mlp(examples, (width + tasks, hidden, hidden), input_gradient=False)
        total += _linear(examples, hidden, tasks)
    return total


def _latest(lengths: Sequence[int], max_events: int | None) -> list[int]:
    return [length if max_events is None else min(length, max_events) for length in lengths]


def _features(spec: GemSpec, schema: BatchSchema, examples: int) -> PassFlops:
    count, numbers = len(schema.ids), len(schema.numbers)
    total = PassFlops()
    if spec.embeddings.embedding_dim != spec.width:
        total += _linear(examples * count, spec.embeddings.embedding_dim, spec.width)
    outputs = spec.numbers.tokens * spec.width
    total += _linear(examples, numbers, outputs, input_gradient=False)
    for vector in schema.vectors:
        total += _linear(examples, vector.width, spec.width, input_gradient=False)
    return total + _linear(
        examples * numbers, spec.numbers.buckets, spec.width, input_gradient=False
    )


def _events(
    stream: StreamInput,
    tokens: int,
    *,
    width: int,
    embedding_dim: int,
    gap_buckets: int,
    hidden: int,
) -> PassFlops:
    inputs = len(stream.ids) * embedding_dim + len(stream.numbers) + gap_buckets
    widths = (inputs, hidden, width) if hidden else (inputs, width)
    return _mlp(tokens, widths, input_gradient=bool(stream.ids))


def _attention(cost: Callable[..., Cost], backward: Callable[..., Cost], **sizes: int) -> PassFlops:
    # Bytes are not asked for here; any width of an element will do.
    sizes["element_bytes"] = 4
    return PassFlops(cost(**sizes).flops, backward(**sizes).flops)


def _heads_of(spec: StreamSpec) -> dict[str, int]:
    width = spec.width // spec.heads
    return {
        "heads": spec.heads,
        "kv_heads": spec.heads,
        "head_width": width,
        "value_width": width,
    }


def _interaction(
    spec: GemSpec, own: StreamSpec, examples: int, lengths: Sequence[int]
) -> PassFlops:
    width, tokens = own.width, sum(lengths)
    total = PassFlops()
    if own.ffn == "gdpa":
        context = examples * spec.summary_tokens
        total += _linear(context, spec.width, 2 * width)
        total += _attention(
            generalized_attention_cost,
            generalized_attention_backward_cost,
            visible_pairs=spec.summary_tokens * tokens,
            q_tokens=tokens,
            k_tokens=context,
            **_heads_of(own),
        )
    if own.summary_tokens:
        total += _summary_pooling(own, examples, tokens)
    if own.target_tokens:
        queries = examples * own.target_tokens
        total += _linear(examples, spec.width, own.target_tokens * width)
        if own.target_attention == "din":
            total += _mlp(tokens, (4 * width, own.target_hidden, 1))
            total += _mean(examples, tokens, width)
        else:
            total += _linear(queries, width, width) + _linear(tokens, width, 2 * width)
            total += _attention(
                jagged_flash_attention_cost,
                jagged_flash_attention_backward_cost,
                visible_pairs=own.target_tokens * tokens,
                q_tokens=queries,
                k_tokens=tokens,
                **_heads_of(own),
            )
            total += _linear(queries, width, width)
    if width != spec.width:
        total += _linear(examples * own.tokens, width, spec.width)
    return total


def _mean(examples: int, tokens: int, width: int) -> PassFlops:
    mean = {"batch": examples, "total_tokens": tokens, "width": width, "element_bytes": 4}
    return PassFlops(jagged_mean_cost(**mean).flops, jagged_mean_backward_cost(**mean).flops)


def _summary_pooling(own: StreamSpec, examples: int, tokens: int) -> PassFlops:
    width, outputs = own.width, own.summary_tokens
    if own.pooling == "mean":
        total = _mean(examples, tokens, width)
        return total + _linear(examples, width, outputs * width) if outputs > 1 else total
    # Queries are made of the seeds once for the whole batch.
    seeds = own.seeds if own.pooling == "hsp" else outputs
    total = _linear(seeds, width, width) + _linear(tokens, width, 2 * width)
    total += _attention(
        pooled_attention_cost,
        pooled_attention_backward_cost,
        batch=examples,
        seeds=seeds,
        k_tokens=tokens,
        **_heads_of(own),
    )
    total += _linear(examples * seeds, width, width)
    if own.pooling == "pma":
        return total + _mlp(examples * outputs, (width, width, width))
    total += _linear(examples * width, seeds, own.kron_rank * outputs)
    return total + _linear(examples * outputs, own.kron_rank * width, width)


def _transformer(
    spec: GemSpec, own: StreamSpec, examples: int, lengths: Sequence[int], *, gated: bool
) -> PassFlops:
    width, tokens = own.width, sum(lengths)
    total = _linear(tokens, width, 3 * width) + _linear(tokens, width, width)
    if own.pattern == "block":
        pairs = sum(block_pairs_in_sequence(length, own.block_tokens) for length in lengths)
        total += _attention(
            block_attention_cost,
            block_attention_backward_cost,
            visible_pairs=pairs,
            tokens=tokens,
            **_heads_of(own),
        )
    else:
        reach = own.window_tokens if own.pattern == "window" else None
        total += _attention(
            jagged_flash_attention_cost,
            jagged_flash_attention_backward_cost,
            visible_pairs=sum(
                visible_pairs_in_sequence(length, length, reach, reach) for length in lengths
            ),
            q_tokens=tokens,
            k_tokens=tokens,
            **_heads_of(own),
        )
    if own.ffn_hidden:
        total += _mlp(tokens, (width, own.ffn_hidden, width))
    if gated:
        total += _linear(examples, spec.summary_tokens * spec.width, width)
    return total


def experts_flops(
    spec: ExpertsSpec, width: int, examples: int, *, tokens: int, summary_tokens: int
) -> PassFlops:
    """Count the FLOPs of a layer's experts and of their shortcut.

    Args:
        spec: the experts.
        width: width of a token.
        examples: examples of the step.
        tokens: tokens that enter the layer.
        summary_tokens: pooled tokens beside them, which every expert reads.

    Returns:
        FLOPs of all experts together.
    """
    total = PassFlops()
    if spec.residual and tokens != spec.tokens:
        total += _linear(examples * width, tokens, spec.tokens)
    for place, part in enumerate(expert_parts(tokens, spec)):
        count = len(range(tokens)[part]) + summary_tokens
        total += _EXPERTS[spec.kind(place)](spec, width, examples, count)
    return total


def _wukong(spec: ExpertsSpec, width: int, examples: int, count: int) -> PassFlops:
    # Xᵀ Y and X (Xᵀ Y): both factors of both products need their gradients.
    total = _linear(examples * width, count, spec.rank)
    total += _linear(examples * count, width, spec.rank)
    if spec.projection == "attentive":
        total += _linear(examples * width, count, spec.rank)
        hidden = spec.mlp_widths[:1]
        total += _mlp(examples, (spec.rank * width, *hidden, count * spec.rank))
    total += _mlp(examples, (count * spec.rank, *spec.mlp_widths, spec.fm_tokens * width))
    return total + _linear(examples * width, count, spec.linear_tokens)


def _cross(spec: ExpertsSpec, width: int, examples: int, count: int) -> PassFlops:
    total = _mlp(examples, (count * width,) * (spec.cross_layers + 1))
    return total + _linear(examples * width, count, spec.tokens)


def _dot(spec: ExpertsSpec, width: int, examples: int, count: int) -> PassFlops:
    pairs = pair_count(count)
    total = _linear(examples * count, width, count)
    return total + _mlp(examples, (pairs, *spec.mlp_widths, spec.tokens * width))


def _deep(spec: ExpertsSpec, width: int, examples: int, count: int) -> PassFlops:
    return _mlp(examples, (count * width, *spec.mlp_widths, spec.tokens * width))


def _among(spec: ExpertsSpec, width: int, examples: int, count: int) -> PassFlops:
    rows = examples * count
    total = _linear(rows, width, 3 * width) + _linear(rows, width, width)
    # Scores and what they weigh, of all heads together.
    total += _linear(rows, width, count) + _linear(rows, count, width)
    return total + _linear(examples * width, count, spec.tokens)


_EXPERTS = {"wukong": _wukong, "cross": _cross, "dot": _dot, "mlp": _deep, "attention": _among}


def _heads(spec: HeadsSpec, schema: BatchSchema, examples: int, width: int) -> PassFlops:
    tasks = len(schema.labels)
    total = _mlp(examples, (width, *spec.trunk_widths))
    width = (width, *spec.trunk_widths)[-1]
    if spec.task_widths:
        for _ in range(tasks):
            total += _mlp(examples, (width, *spec.task_widths))
        width = spec.task_widths[-1]
    domains = len(schema.domains) if spec.domain_outputs else 1
    return total + _linear(examples * tasks, width, domains)


def _shortcut(schema: BatchSchema, examples: int) -> PassFlops:
    return _linear(examples, len(schema.numbers), len(schema.labels), input_gradient=False)


def _din(
    spec: DinSpec, schema: BatchSchema, examples: int, lengths: Mapping[str, Sequence[int]]
) -> dict[str, PassFlops]:
    parts: dict[str, PassFlops] = {}
    embedding_dim = spec.embeddings.embedding_dim
    if schema.streams:
        parts["candidate"] = _linear(examples, embedding_dim, spec.width)
    for stream in schema.streams:
        tokens = sum(lengths[stream.name])
        parts[f"events.stream_{stream.name}"] = _events(
            stream,
            tokens,
            width=spec.width,
            embedding_dim=embedding_dim,
            gap_buckets=spec.gap_buckets,
            hidden=0,
        )
        widths = (4 * spec.width, *spec.attention_widths, 1)
        parts[f"attention.stream_{stream.name}"] = _mlp(tokens, widths) + _mean(
            examples, tokens, spec.width
        )
    width = len(schema.ids) * embedding_dim + len(schema.numbers)
    parts["heads"] = _heads(spec.heads, schema, examples, width + len(schema.streams) * spec.width)
    if spec.shortcut:
        parts["shortcut"] = _shortcut(schema, examples)
    return parts
