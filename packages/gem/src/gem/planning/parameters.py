"""Names and shapes of the dense parameters of a recipe's model, without building it.

A test holds them to the real modules. In the order of the forward pass, by unit.
"""

from collections.abc import Sequence

from gem.data.schema import BatchSchema, StreamInput
from gem.model.expert_spec import ExpertKind, ExpertsSpec
from gem.model.spec import GemSpec, LayerKind
from gem.model.stream_spec import StreamSpec
from gem.model.structure import (
    expert_parts,
    feature_tokens,
    head_width,
    module_key,
    pair_count,
    pooled_tokens,
    reads_summary,
    streams_read,
    takes_part,
)
from gem_parallel.planning.work import Parameter

Parameters = tuple[Parameter, ...]


def mlp_parameters(name: str, widths: Sequence[int]) -> Parameters:
    """Weights of an MLP.

    Args:
        name: of the module.
        widths: sizes of the input and of each layer.

    Returns:
        names and shapes, as the module has them.
    """
    return tuple(
        Parameter(f"{name}.projections.{i}.weight", widths[i + 1], widths[i])
        for i in range(len(widths) - 1)
    )


def feature_parameters(spec: GemSpec, schema: BatchSchema) -> Parameters:
    """Parameters of the tokens of an example.

    Args:
        spec: the model.
        schema: the inputs that it reads.

    Returns:
        names and shapes, as the module has them.
    """
    found: list[Parameter] = []
    count, numbers, width = len(schema.ids), len(schema.numbers), spec.width
    if count and spec.embeddings.embedding_dim != width:
        found.append(Parameter("features.projection", count, spec.embeddings.embedding_dim * width))
    if numbers and spec.numbers.buckets:
        found.append(Parameter("features.bucketed", numbers, spec.numbers.buckets * width))
    if numbers and spec.numbers.tokens:
        found.append(Parameter("features.linear.weight", spec.numbers.tokens * width, numbers))
    return tuple(found)


def event_inputs(spec: GemSpec, stream: StreamInput) -> int:
    """Numbers that an event's token is made of.

    Args:
        spec: the model.
        stream: its inputs.

    Returns:
        columns of the product that makes the token.
    """
    own = spec.stream_spec(stream.name)
    return len(stream.ids) * spec.embeddings.embedding_dim + len(stream.numbers) + own.gap_buckets


def event_parameters(spec: GemSpec, stream: StreamInput) -> Parameters:
    """Parameters of the tokens of a stream's events.

    Args:
        spec: the model.
        stream: its inputs.

    Returns:
        names and shapes, as the module has them.
    """
    own, inputs = spec.stream_spec(stream.name), event_inputs(spec, stream)
    name = f"events.{module_key(stream.name)}.mix"
    if own.token_hidden:
        return mlp_parameters(name, (inputs, own.token_hidden, own.width))
    return (Parameter(f"{name}.weight", own.width, inputs),)


def _interaction(name: str, spec: GemSpec, own: StreamSpec) -> Parameters:
    width = own.width
    found: list[Parameter] = []
    if own.ffn == "gdpa":
        found.append(Parameter(f"{name}.ffn.kv.weight", 2 * width, spec.width))

    def pooling(at: str, seeds: int) -> None:
        if seeds:
            found.append(Parameter(f"{at}.seeds_PD", seeds, width))
        found.extend(
            Parameter(f"{at}.{part}.weight", times * width, width)
            for part, times in (("q", 1), ("kv", 2), ("out", 1))
        )

    if own.summary_tokens and own.pooling == "mean":
        if own.summary_tokens > 1:
            rows = own.summary_tokens * width
            found.append(Parameter(f"{name}.pool.spread.weight", rows, width))
    elif own.summary_tokens and own.pooling == "pma":
        pooling(f"{name}.pool.pool", own.summary_tokens)
        found += mlp_parameters(f"{name}.pool.mlp", (width, width, width))
    elif own.summary_tokens:
        pooling(f"{name}.pool.pool", own.seeds)
        at = f"{name}.pool.compress"
        found.append(Parameter(f"{at}.z", own.kron_rank * own.summary_tokens, own.seeds))
        found.append(Parameter(f"{at}.w", own.kron_rank * width, width))
    if own.target_tokens:
        rows = own.target_tokens * width
        found.append(Parameter(f"{name}.make_query.weight", rows, spec.width))
        if own.target_attention == "din":
            found += mlp_parameters(f"{name}.target_pool.mlp", (4 * width, own.target_hidden, 1))
        else:
            pooling(f"{name}.target_pool", 0)
    if width != spec.width:
        found.append(Parameter(f"{name}.lift.weight", spec.width, width))
    return tuple(found)


def _transformer(name: str, spec: GemSpec, own: StreamSpec, *, gated: bool) -> Parameters:
    width = own.width
    found = [
        Parameter(f"{name}.attention.qkv.weight", 3 * width, width),
        Parameter(f"{name}.attention.out.weight", width, width),
    ]
    if gated:
        found.append(Parameter(f"{name}.gate.weight", width, spec.summary_tokens * spec.width))
    if own.ffn_hidden:
        found += mlp_parameters(f"{name}.ffn", (width, own.ffn_hidden, width))
    return tuple(found)


def _stream(name: str, kind: LayerKind, spec: GemSpec, own: StreamSpec) -> Parameters:
    if kind == "interaction":
        return _interaction(name, spec, own)
    if kind == "transformer":
        return _transformer(name, spec, own, gated=spec.transformer_gate)
    before = _transformer(f"{name}.transformer", spec, own, gated=False)
    return (*before, *_interaction(f"{name}.interaction", spec, own))


def layer_parameters(spec: GemSpec, schema: BatchSchema, index: int) -> Parameters:
    """Parameters of a layer, without those of its experts.

    Args:
        spec: the model.
        schema: the inputs that it reads.
        index: which layer.

    Returns:
        names and shapes, as the module has them, also of what lies around the experts.
    """
    kind, name = spec.layers[index], f"layers.{index}"
    tokens = layer_tokens(spec, schema, index)
    streams = streams_read(spec, schema)
    found: list[Parameter] = []
    if reads_summary(spec, streams, index):
        at = f"{name}.summary"
        found.append(Parameter(f"{at}.compress.weight", spec.summary_tokens, tokens))
        found += mlp_parameters(f"{at}.mlp", (spec.width, spec.summary_hidden, spec.width))
    for stream in streams:
        if takes_part(spec, stream.name, index):
            at = f"{name}.streams.{module_key(stream.name)}"
            found += _stream(at, kind, spec, spec.stream_spec(stream.name))
    outputs = spec.experts.tokens
    if spec.experts.residual and tokens != outputs:
        found.append(Parameter(f"{name}.experts.shortcut.weight", outputs, tokens))
    return tuple(found)


def layer_tokens(spec: GemSpec, schema: BatchSchema, index: int) -> int:
    """Non-sequence tokens that enter a layer.

    Args:
        spec: the model.
        schema: the inputs that it reads.
        index: which layer.

    Returns:
        those of the features for the first layer, of the layer before for others.
    """
    if index == 0:
        return feature_tokens(spec, schema)
    return spec.experts.fm_tokens + spec.experts.linear_tokens


def expert_inputs(spec: GemSpec, schema: BatchSchema, index: int) -> list[int]:
    """Tokens that each expert of a layer reads.

    Args:
        spec: the model.
        schema: the inputs that it reads.
        index: which layer.

    Returns:
        one number for each expert, pooled tokens of the streams included.
    """
    tokens = layer_tokens(spec, schema, index)
    pooled = pooled_tokens(spec, streams_read(spec, schema), index)
    return [len(range(tokens)[p]) + pooled for p in expert_parts(tokens, spec.experts)]


def expert_parameters(
    name: str, spec: ExpertsSpec, kind: ExpertKind, width: int, tokens: int
) -> Parameters:
    """Parameters of one expert.

    Args:
        name: qualified name of its module.
        spec: sizes.
        kind: of the expert.
        width: width of a token.
        tokens: tokens that it reads.

    Returns:
        names and shapes, as the module has them.
    """
    flat, outputs = tokens * width, spec.tokens * width
    if kind == "mlp":
        return mlp_parameters(f"{name}.mlp", (flat, *spec.mlp_widths, outputs))
    if kind == "dot":
        return mlp_parameters(f"{name}.mlp", (pair_count(tokens), *spec.mlp_widths, outputs))
    compress = Parameter(f"{name}.compress.weight", spec.tokens, tokens)
    if kind == "cross":
        layers = range(spec.cross_layers)
        return (*(Parameter(f"{name}.cross.{i}.weight", flat, flat) for i in layers), compress)
    if kind == "attention":
        qkv = Parameter(f"{name}.qkv.weight", 3 * width, width)
        return (qkv, Parameter(f"{name}.out.weight", width, width), compress)
    rank = spec.rank
    if spec.projection == "learned":
        found: Parameters = (Parameter(f"{name}.factorise.make_y.y", tokens, rank),)
    else:
        at = f"{name}.factorise.make_y"
        widths = (rank * width, *spec.mlp_widths[:1], tokens * rank)
        found = (
            Parameter(f"{at}.compress.weight", rank, tokens),
            *mlp_parameters(f"{at}.mlp", widths),
        )
    widths = (tokens * rank, *spec.mlp_widths, spec.fm_tokens * width)
    return (
        *found,
        *mlp_parameters(f"{name}.factorise.mlp", widths),
        Parameter(f"{name}.compress.weight", spec.linear_tokens, tokens),
    )


def head_parameters(spec: GemSpec, schema: BatchSchema) -> Parameters:
    """Parameters of the heads.

    Args:
        spec: the model.
        schema: the inputs that it reads.

    Returns:
        names and shapes, as the module has them.
    """
    heads, tasks = spec.heads, len(schema.labels)
    width = head_width(spec, schema, streams_read(spec, schema))
    found: list[Parameter] = []
    if heads.trunk_widths:
        found += mlp_parameters("heads.trunk.0", (width, *heads.trunk_widths))
        width = heads.trunk_widths[-1]
    if heads.task_widths:
        for task in range(tasks):
            found += mlp_parameters(f"heads.towers.{task}.0", (width, *heads.task_widths))
        width = heads.task_widths[-1]
    domains = len(schema.domains) if heads.domain_outputs else 1
    found.append(Parameter("heads.weight", tasks, width * domains))
    found.append(Parameter("heads.offset", tasks, domains))
    return tuple(found)


def shortcut_parameters(spec: GemSpec, schema: BatchSchema) -> Parameters:
    """Parameters of the linear map from the numbers to the logits.

    Args:
        spec: the model.
        schema: the inputs that it reads.

    Returns:
        one weight; none for a model without a shortcut.
    """
    if not (spec.numbers.shortcut and schema.numbers):
        return ()
    return (Parameter("shortcut.linear.weight", len(schema.labels), len(schema.numbers)),)
