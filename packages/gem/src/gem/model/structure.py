"""What a spec and a schema make together: which streams run where, and how many tokens there are.

Torch-free, because the modules and the FLOP counts must agree on it.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import pairwise

from gem.data.schema import BatchSchema, StreamInput
from gem.model.expert_spec import ExpertsSpec
from gem.model.spec import DinSpec, GemSpec
from gem_opkit.errors import ConfigError, refusal


def module_key(stream: str) -> str:
    """Name a stream's submodule; the prefix keeps names like "items" apart from methods.

    Args:
        stream: name of the stream.

    Returns:
        key of a module dict.
    """
    return f"stream_{stream}"


def reduce_schema(schema: BatchSchema, leave_out: tuple[str, ...]) -> BatchSchema:
    """Remove the inputs that a model does not read.

    Args:
        schema: all inputs of the data set.
        leave_out: names of id features and numbers; "stream.field" for fields of events. A star
            stands for any characters, as in "content_*" and "*.content_*".

    Returns:
        the schema without them.

    Raises:
        ConfigError: a name that is no input, or a pattern that none has.
    """
    known = {source.name for source in schema.ids} | set(schema.numbers)
    for stream in schema.streams:
        fields = [source.name for source in stream.ids] + list(stream.numbers)
        known |= {f"{stream.name}.{field}" for field in fields}
    # A name means itself, whatever is in it. A star does not reach over the dot between a stream
    # and its field.
    found = {
        name: {name} & known
        or {k for k in known if k.count(".") == name.count(".") and fnmatchcase(k, name)}
        for name in leave_out
    }
    gone = {name for names in found.values() for name in names}
    unknown = sorted(name for name, names in found.items() if not names)
    if unknown:
        raise ConfigError(
            refusal(
                "build_model",
                "leave_out",
                must=f"name inputs of the data set ({', '.join(sorted(known))})",
                got=", ".join(unknown),
                fix="correct or remove them",
            )
        )
    return schema.model_copy(
        update={
            "ids": tuple(source for source in schema.ids if source.name not in gone),
            "numbers": kept_names(schema.numbers, gone),
            "streams": tuple(
                stream.model_copy(
                    update={
                        "ids": tuple(
                            s for s in stream.ids if f"{stream.name}.{s.name}" not in gone
                        ),
                        "numbers": tuple(
                            n for n in stream.numbers if f"{stream.name}.{n}" not in gone
                        ),
                    }
                )
                for stream in schema.streams
            ),
        }
    )


def user_side(schema: BatchSchema) -> BatchSchema:
    """Keep what a model of users may read before its heads.

    Args:
        schema: the inputs that the model reads.

    Returns:
        inputs of the user and the events; no candidate, no moment, no embedding.

    Raises:
        ConfigError: no input belongs to the user, or the candidate is not known.
    """
    own = set(schema.of_user)
    names = [source.name for source in schema.ids]
    fault: tuple[str, str, str] | None = None
    if schema.item not in names:
        fault = ("the candidate's id", "none", "let the recipe read the item")
    elif not own & {*names, *schema.numbers}:
        fault = ("inputs of the user", "none", "read the user's id or fields of its entity")
    elif schema.vectors:
        fault = ("no embeddings of users", schema.vectors[0].name, "remove data.user_embeddings")
    if fault:
        raise ConfigError(
            refusal(
                "build_model", "user_model", must=f"read {fault[0]}", got=fault[1], fix=fault[2]
            )
        )
    return schema.model_copy(
        update={
            "ids": tuple(source for source in schema.ids if source.name in own),
            "numbers": tuple(name for name in schema.numbers if name in own),
            "item": None,
        }
    )


def context_is_of_user(spec: GemSpec) -> bool:
    """Say whether what the event streams read of the other inputs is the user's alone.

    Args:
        spec: the model.

    Returns:
        True for a model of users: its layers are the same for all candidates.
    """
    return spec.user_model is not None


def kept_names(names: tuple[str, ...], gone: set[str]) -> tuple[str, ...]:
    """List the names that stay.

    Args:
        names: all of them.
        gone: those that go.

    Returns:
        the others, in order.
    """
    return tuple(name for name in names if name not in gone)


def streams_read(spec: GemSpec, schema: BatchSchema) -> tuple[StreamInput, ...]:
    """List the streams that the model reads: all but those that take part in no layer.

    Args:
        spec: the model.
        schema: the inputs.

    Returns:
        streams, in the order of the schema.
    """
    return tuple(s for s in schema.streams if spec.stream_spec(s.name).layers != ())


def takes_part(spec: GemSpec, stream: str, index: int) -> bool:
    """Say whether a stream takes part in a layer.

    Args:
        spec: the model.
        stream: name of the stream.
        index: which layer.

    Returns:
        True if it does.
    """
    layers = spec.stream_spec(stream).layers
    return layers is None or index in layers


def reads_summary(spec: GemSpec, streams: tuple[StreamInput, ...], index: int) -> bool:
    """Say whether a stream reads the non-sequence summary in a layer.

    Args:
        spec: the model.
        streams: the streams that it reads.
        index: which layer.

    Returns:
        True if one takes part in it whose events read it: by GDPA, or through the gate of a
        transformer layer.
    """
    own = [spec.stream_spec(s.name) for s in streams if takes_part(spec, s.name, index)]
    if spec.layers[index] == "transformer":
        return bool(own) and spec.transformer_gate
    return any(stream.ffn == "gdpa" for stream in own)


def feature_tokens(spec: GemSpec, schema: BatchSchema) -> int:
    """Count the tokens that enter the first layer.

    Args:
        spec: the model.
        schema: the inputs that it reads.

    Returns:
        tokens of id features, of all numbers together, of bucketised numbers, and of cached
        embeddings.
    """
    numbers = len(schema.numbers)
    together = (spec.numbers.tokens if numbers else 0) + len(schema.vectors)
    return len(schema.ids) + together + (numbers if spec.numbers.buckets else 0)


def pooled_tokens(spec: GemSpec, streams: tuple[StreamInput, ...], index: int) -> int:
    """Count the pooled tokens of all streams once a layer's streams have run.

    Args:
        spec: the model.
        streams: the streams that it reads.
        index: which layer.

    Returns:
        tokens; a stream that no layer has pooled so far has none.
    """
    pooling = [i for i in range(index + 1) if spec.layers[i] != "transformer"]
    total = 0
    for stream in streams:
        if any(takes_part(spec, stream.name, earlier) for earlier in pooling):
            total += spec.stream_spec(stream.name).tokens
    return total


def head_width(spec: GemSpec, schema: BatchSchema, streams: tuple[StreamInput, ...]) -> int:
    """Count what the heads' trunk reads of an example.

    Args:
        spec: the model.
        schema: the inputs that it reads.
        streams: the streams that it reads.

    Returns:
        the last layer's tokens and the pooled ones, flattened, and the numbers.
    """
    tokens = spec.experts.tokens
    tokens += pooled_tokens(spec, streams, len(spec.layers) - 1)
    return tokens * spec.width + (len(schema.numbers) if spec.numbers.trunk else 0)


def loss_weights(spec: GemSpec | DinSpec, schema: BatchSchema) -> tuple[float, ...]:
    """List the weight of every task's loss.

    Args:
        spec: the model.
        schema: the tasks.

    Returns:
        weights, in the order of the labels; 1 where the spec names none.
    """
    return tuple(spec.heads.task_weights.get(task, 1.0) for task in schema.labels)


def expert_parts(tokens: int, spec: ExpertsSpec) -> list[slice]:
    """Say which tokens of a layer each expert reads.

    Args:
        tokens: tokens of the layer.
        spec: number of experts and the rule.

    Returns:
        one slice for each expert. Under "interleaved" and "contiguous" every token belongs to
        exactly one of them, and their sizes differ by at most 1.
    """
    if spec.partition == "all":
        return [slice(0, tokens)] * spec.count
    if spec.partition == "interleaved":
        return [slice(first, tokens, spec.count) for first in range(spec.count)]
    edges = [tokens * index // spec.count for index in range(spec.count + 1)]
    return [slice(low, high) for low, high in pairwise(edges)]


def check_schema(spec: GemSpec, schema: BatchSchema) -> None:
    """Refuse a spec that the data set cannot serve.

    Args:
        spec: the model.
        schema: the inputs that it reads.

    Raises:
        ConfigError: a stream that does not exist, or target tokens without a candidate.
    """
    known = [stream.name for stream in schema.streams]
    unknown = [name for name in spec.streams if name not in known]
    if unknown:
        raise ConfigError(
            refusal(
                "build_model",
                "streams",
                must=f"name streams of the data set ({', '.join(known) or 'it has none'})",
                got=", ".join(unknown),
                fix="correct or remove them",
            )
        )
    names = [source.name for source in schema.ids]
    for stream in streams_read(spec, schema):
        target_tokens = spec.stream_spec(stream.name).target_tokens
        if target_tokens and schema.item not in names:
            raise ConfigError(
                refusal(
                    "build_model",
                    f"target_tokens of stream {stream.name}",
                    must="be 0 where the model reads no candidate",
                    got=target_tokens,
                    fix="set stream.target_tokens = 0, or declare the item",
                )
            )
    if schema.teacher and spec.distillation is None:
        raise ConfigError(
            refusal(
                "build_model",
                "distillation",
                must="say what becomes of the predictions that data.teacher names",
                got="no section model.distillation",
                fix="set model.distillation = {}, or remove data.teacher",
            )
        )


def check_tasks(name: str, given: Mapping[str, float], tasks: tuple[str, ...]) -> None:
    """Refuse settings of tasks that do not exist.

    Args:
        name: where they stand in the recipe.
        given: task -> setting.
        tasks: the schema's tasks.

    Raises:
        ConfigError: an unknown task.
    """
    unknown = [task for task in given if task not in tasks]
    if unknown:
        raise ConfigError(
            refusal(
                "build_model",
                name,
                must=f"name tasks of the data set ({', '.join(tasks)})",
                got=", ".join(unknown),
                fix="correct or remove them",
            )
        )


def pair_count(tokens: int) -> int:
    """Count the products that a dot expert makes of its tokens.

    Args:
        tokens: tokens, at least 1.

    Returns:
        pairs of different tokens; 1 for a single token.
    """
    return tokens * (tokens - 1) // 2 if tokens > 1 else 1
