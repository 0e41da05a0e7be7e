"""The work of a recipe: what one rank has to do in a training step, from plain numbers.

Torch-free. FLOPs are those of `gem.model.flops`, which every MFU rests on; a test holds names,
shapes, FLOPs and kept bytes to the real modules.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gem.config import RunConfig
from gem.data.schema import BatchSchema
from gem.model.flops import PassFlops, training_flops
from gem.model.spec import GemSpec
from gem.model.structure import (
    head_width,
    module_key,
    reduce_schema,
    streams_read,
    takes_part,
    user_side,
)
from gem.planning.expert_operators import expert_flops, expert_passes, mixture_passes
from gem.planning.lengths import LengthLaw, id_laws, length_laws
from gem.planning.operators import (
    Passes,
    Sizes,
    event_passes,
    example_passes,
    interaction_passes,
    keeps_events,
    mean_pooling,
    pooling_attention,
    product,
    self_attention,
    summary_passes,
    transformer_passes,
)
from gem.planning.parameters import (
    event_inputs,
    event_parameters,
    expert_inputs,
    expert_parameters,
    feature_parameters,
    head_parameters,
    layer_parameters,
    layer_tokens,
    shortcut_parameters,
)
from gem.planning.schema import declared_schema
from gem.planning.spread import slowest_of, spread_of
from gem.planning.user_heads import user_head_parameters, user_head_passes
from gem_opkit.errors import UnsupportedError, refusal
from gem_parallel.planning.work import Expert, Operator, Parameter, Unit, Work

_BYTES = {"fp32": 4, "bf16_autocast": 2}
_ID_BYTES, _WIDE = 8, 4


def work_of(
    config: RunConfig,
    schema: BatchSchema | None = None,
    *,
    examples: int | None = None,
    lengths: Mapping[str, LengthLaw] | None = None,
    ids: Mapping[str, float] | None = None,
) -> Work:
    """Count what a training step of a recipe needs on one rank.

    Args:
        config: the recipe.
        schema: inputs of its data set; None to derive them from what the data set declares.
        examples: examples of a rank; None for the recipe's whole batch, as on one rank.
        lengths: stream -> how long its histories are, where that is not known or another one is
            meant.
        ids: input -> mean number of ids of an example, for inputs with several.

    Returns:
        the work, without tables.

    Raises:
        ConfigError: a data set that is not there, or lengths that nobody has said.
        UnsupportedError: a model or a number format that is not counted.
    """
    spec = config.model
    if not isinstance(spec, GemSpec):
        raise UnsupportedError(
            refusal(
                "gem plan",
                "model.kind",
                must='be "gem"',
                got=repr(spec.kind),
                fix="plan for the hybrid model; the comparison model fits one device",
            )
        )
    _refuse_transfer(config, spec)
    element = _element_bytes(config)
    whole = declared_schema(config) if schema is None else schema
    examples = config.train.batch_examples if examples is None else examples
    laws = length_laws(config.data, whole, lengths or {})
    schema = reduce_schema(whole, spec.leave_out)
    counts = id_laws(config.data, schema.ids, ids or {})
    sizes = _sizes(spec, schema, laws, examples, element)
    flops = training_flops(
        spec, whole, examples=examples, lengths={n: s.lengths for n, s in sizes.items()}
    )
    units = _units(spec, schema, sizes, flops, examples, element)
    if config.parallel is not None and config.parallel.overlap_sides:
        units = _side_by_side(spec, units)
    tokens = sum(size.tokens for size in sizes.values())
    vectors = examples * len(schema.ids)
    event_ids = {s.name: len(s.ids) for s in schema.streams}
    vectors += sum(size.tokens * event_ids[name] for name, size in sizes.items())
    given = examples * (sum(law.mean for law in counts.values()) + len(schema.numbers))
    given += sum(size.tokens * (event_ids[name] + 2) for name, size in sizes.items())
    return Work(
        name=config.name,
        units=tuple(units),
        examples=examples,
        tokens=tokens,
        compute_bytes=element,
        input_bytes=round(given * _ID_BYTES),
        spread=spread_of(spec, whole, laws) / math.sqrt(examples),
        slowest=slowest_of(config, whole, laws, examples),
        # Vectors, beside their copy in the tokens' input.
        table_copy_bytes=2 * vectors * spec.embeddings.embedding_dim * _WIDE,
        # Gradients of a layer's input and of what it made of that.
        scratch_bytes=2
        * element
        * max((s.tokens * spec.stream_spec(n).width for n, s in sizes.items()), default=0),
        micro_batches=config.train.accumulation_parts,
    )


def _refuse_transfer(config: RunConfig, spec: GemSpec) -> None:
    """Refuse what other models give: it is trained, and not counted here."""
    found = {
        "model.distillation": spec.distillation,
        "data.user_embeddings": config.data.user_embeddings or None,
        "data.teacher": config.data.teacher,
    }
    for key, section in found.items():
        if section is not None:
            raise UnsupportedError(
                refusal(
                    "gem plan",
                    key,
                    must="be left out: plans count models without it",
                    got="a section",
                    fix="plan for the same recipe without it; it adds little to a step",
                )
            )


def _element_bytes(config: RunConfig) -> int:
    wanted: list[str] = list(config.precision.formats())
    if len(wanted) > 1 or wanted[0] not in _BYTES:
        raise UnsupportedError(
            refusal(
                "gem plan",
                "precision",
                must=f"be one of {', '.join(_BYTES)} throughout",
                got=", ".join(wanted),
                fix='plan with --set precision.default="bf16_autocast"',
            )
        )
    return _BYTES[wanted[0]]


def _sizes(
    spec: GemSpec,
    schema: BatchSchema,
    laws: Mapping[str, LengthLaw],
    examples: int,
    element: int,
) -> dict[str, Sizes]:
    found: dict[str, Sizes] = {}
    for stream in streams_read(spec, schema):
        own = spec.stream_spec(stream.name)
        most = min(stream.max_events, own.max_events or stream.max_events)
        lengths = laws[stream.name].quantiles(examples, most=most)
        found[stream.name] = Sizes(examples, lengths, element)
    return found


def _units(
    spec: GemSpec,
    schema: BatchSchema,
    sizes: Mapping[str, Sizes],
    flops: Mapping[str, PassFlops],
    examples: int,
    element: int,
) -> list[Unit]:
    # What layers read: of a model of users, nothing of the candidate.
    inner = schema if spec.user_model is None else user_side(schema)
    inputs = len(inner.ids) * spec.embeddings.embedding_dim + len(inner.numbers)
    units = [
        _plain_unit(
            "features",
            feature_parameters(spec, inner),
            flops["features"],
            examples,
            example_passes(inputs, (), examples, element),
            element,
        )
    ]
    for stream in streams_read(spec, schema):
        name = f"events.{module_key(stream.name)}"
        tokens, own = sizes[stream.name].tokens, spec.stream_spec(stream.name)
        passes = event_passes(event_inputs(spec, stream), own, tokens, element)
        parameters = event_parameters(spec, stream)
        units.append(_plain_unit(name, parameters, flops[name], tokens, passes, element))
    for index in range(len(spec.layers)):
        units += _layer(spec, inner, sizes, flops, index, examples, element)
    width = head_width(spec, inner, streams_read(spec, inner))
    if (own := spec.user_model) is not None:
        parameters = user_head_parameters(spec, own, schema, width=width)
        passes = user_head_passes(spec, own, schema, width=width, examples=examples, e=element)
        units.append(_plain_unit("heads", parameters, flops["heads"], examples, passes, element))
        return units
    hidden = (*spec.heads.trunk_widths, *spec.heads.task_widths * len(schema.labels))
    passes = example_passes(width, hidden, examples, element)
    parameters = head_parameters(spec, schema)
    units.append(_plain_unit("heads", parameters, flops["heads"], examples, passes, element))
    if parameters := shortcut_parameters(spec, schema):
        passes = example_passes(len(schema.numbers), (), examples, element)
        counted = flops["shortcut"]
        units.append(_plain_unit("shortcut", parameters, counted, examples, passes, element))
    return units


def _side_by_side(spec: GemSpec, units: Sequence[Unit]) -> list[Unit]:
    """Experts of transformer layers beside the streams, of which they read nothing."""
    beside = {
        f"layers.{n}.experts": f"layers.{n}"
        for n, kind in enumerate(spec.layers)
        if kind == "transformer"
    }
    return [replace(unit, beside=beside.get(unit.name)) for unit in units]


def _plain_unit(
    name: str,
    parameters: Sequence[Parameter],
    flops: PassFlops,
    rows: int,
    passes: Passes,
    element: int,
) -> Unit:
    return Unit(
        name=name,
        parameters=tuple(parameters),
        operators=(
            product(flops, rows, parameters, element),
            passes.operator(),
        ),
        kept_bytes=passes.kept,
    )


def _layer(
    spec: GemSpec,
    schema: BatchSchema,
    sizes: Mapping[str, Sizes],
    flops: Mapping[str, PassFlops],
    index: int,
    examples: int,
    element: int,
) -> list[Unit]:
    """Summary and streams of a layer, and the experts behind them: two units, as in the trainer."""
    name, kind = f"layers.{index}", spec.layers[index]
    tokens = layer_tokens(spec, schema, index)
    everything = layer_parameters(spec, schema, index)
    around = [p for p in everything if p.name.startswith(f"{name}.experts.")]
    parameters = [p for p in everything if p not in around]
    streams = [s for s in streams_read(spec, schema) if takes_part(spec, s.name, index)]
    operators: list[Operator] = []
    kept = 0

    def take(passes: Passes) -> None:
        nonlocal kept
        operators.append(passes.operator())
        kept += passes.kept

    def of(prefix: str) -> list[Parameter]:
        return [p for p in parameters if p.name.startswith(f"{prefix}.")]

    if f"{name}.summary" in flops:
        rows = examples * spec.summary_tokens
        at = f"{name}.summary"
        operators.append(product(flops[at], rows, of(f"{at}.mlp"), element))
        take(summary_passes(spec, tokens, examples, element))
    for stream in streams:
        own, size = spec.layer_stream_spec(stream.name, index), sizes[stream.name]
        at = f"{name}.streams.{module_key(stream.name)}"
        attention: list[Operator] = []
        kept_before = _keeps_events(spec, stream.name, index)
        if kind != "interaction":
            attention.append(self_attention(own, size))
            gated = spec.transformer_gate and kind == "transformer"
            take(transformer_passes(own, size, gated=gated, input_is_kept=kept_before))
        if kind != "transformer":
            attention += [*pooling_attention(spec, own, size), *mean_pooling(own, size)]
            kept_before = kept_before and kind == "interaction"
            take(interaction_passes(spec, own, size, input_is_kept=kept_before))
        operators += attention
        counted = PassFlops(
            sum(op.forward.flops for op in attention), sum(op.backward.flops for op in attention)
        )
        rest = PassFlops(flops[at].forward - counted.forward, flops[at].backward - counted.backward)
        over_events = [p for p in of(at) if _reads_events(p.name)]
        operators.append(product(rest, size.tokens, over_events, element))
    before = Unit(
        name=name, parameters=tuple(parameters), operators=tuple(operators), kept_bytes=kept
    )
    return [before, _mixture(spec, schema, flops, index, examples, element, around)]


def _keeps_events(spec: GemSpec, stream: str, index: int) -> bool:
    """Whether what a stream's layers before this one give is kept by one of them."""
    for earlier in reversed(range(index)):
        own = spec.stream_spec(stream)
        if takes_part(spec, stream, earlier) and spec.layers[earlier] != "interaction":
            return spec.layers[earlier] == "both" and keeps_events(own)
        if takes_part(spec, stream, earlier) and (own.ffn == "gdpa" or keeps_events(own)):
            return keeps_events(own)
    return False


def _reads_events(name: str) -> bool:
    """Whether a stream's weight reads every event; the others read a few rows an example."""
    ends = (".attention.qkv.weight", ".attention.out.weight", "pool.kv.weight")
    return name.endswith(ends) or ".ffn.projections." in name or ".target_pool.mlp." in name


def _mixture(
    spec: GemSpec,
    schema: BatchSchema,
    flops: Mapping[str, PassFlops],
    index: int,
    examples: int,
    element: int,
    around: Sequence[Parameter],
) -> Unit:
    """The experts of a layer, with their shortcut and norm."""
    name = f"layers.{index}.experts"
    passes = mixture_passes(spec, layer_tokens(spec, schema, index), examples, element)
    experts = _experts(spec, schema, index, flops[name], examples, element)
    shared = flops[name]
    for expert in experts:
        own_flops = next(op for op in expert.operators if op.kind == "matmul")
        shared = PassFlops(
            shared.forward - own_flops.forward.flops, shared.backward - own_flops.backward.flops
        )
    return Unit(
        name=name,
        parameters=tuple(around),
        operators=(
            passes.operator(),
            product(shared, examples, (), element),
        ),
        kept_bytes=passes.kept,
        experts=experts,
        output_bytes=examples * spec.experts.tokens * spec.width * element,
    )


def _experts(
    spec: GemSpec,
    schema: BatchSchema,
    index: int,
    flops: PassFlops,
    examples: int,
    element: int,
) -> tuple[Expert, ...]:
    found: list[Expert] = []
    for place, tokens in enumerate(expert_inputs(spec, schema, index)):
        name = f"layers.{index}.experts.experts.{place}"
        kind = spec.experts.kind(place)
        parameters = expert_parameters(name, spec.experts, kind, spec.width, tokens)
        passes = expert_passes(spec.experts, kind, spec.width, tokens, examples, element)
        # An attention expert multiplies each token, the others all tokens of an example at once.
        rows = examples * tokens if kind == "attention" else examples
        weights = [p for p in parameters if _multiplies(p.name)]
        found.append(
            Expert(
                parameters=parameters,
                operators=(
                    product(expert_flops(spec, kind, tokens, examples), rows, weights, element),
                    passes.operator(),
                ),
                kept_bytes=passes.kept,
                input_bytes=examples * tokens * spec.width * element,
            )
        )
    return tuple(found)


def _multiplies(name: str) -> bool:
    """Whether an expert's weight is one of a product over rows, not one that mixes tokens."""
    return ".mlp." in name or ".cross." in name or name.endswith((".qkv.weight", ".out.weight"))
