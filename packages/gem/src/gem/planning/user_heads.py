"""The heads of a model of users in numbers: parameters, elementwise work and what is kept."""

from gem.data.schema import BatchSchema
from gem.model.spec import GemSpec
from gem.model.transfer_spec import UserModelSpec
from gem.planning.operators import Passes, example_passes
from gem.planning.parameters import Parameters, mlp_parameters
from gem_parallel.planning.work import Parameter

_WIDE, _MARK = 4, 1


def _inputs(schema: BatchSchema) -> tuple[int, int]:
    """Id inputs that the heads read: of candidate and moment, and of the candidate alone."""
    candidate = [source.name for source in schema.ids if source.name not in schema.of_user]
    return len(candidate), sum(name in schema.of_item for name in candidate)


def user_head_parameters(
    spec: GemSpec, own: UserModelSpec, schema: BatchSchema, *, width: int
) -> Parameters:
    """Parameters of the heads of a model of users.

    Args:
        spec: the model.
        own: what it has for users.
        schema: all inputs that it reads, those of the candidate among them.
        width: of what its layers make of a user.

    Returns:
        names and shapes, as the module has them.
    """
    tasks, embedding = len(schema.labels), spec.embeddings.embedding_dim
    candidate, items = _inputs(schema)
    widths = (width, *spec.heads.trunk_widths)
    found = list(mlp_parameters("heads.trunk.0", widths)) if len(widths) > 1 else []
    found.append(Parameter("heads.embed.weight", own.width, widths[-1]))
    found += mlp_parameters("heads.candidate.0", (candidate * embedding, own.candidate_hidden))
    found.append(Parameter("heads.mixed.weight", tasks * (own.width + 1), own.candidate_hidden))
    found.append(Parameter("heads.gain", tasks))
    found.append(Parameter("heads.item.weight", own.width, items * embedding))
    found.append(Parameter("heads.gap.weight", own.time_gap_knots, own.width))
    domains = len(schema.domains) if spec.heads.domain_outputs else 1
    found.append(Parameter("heads.offset", tasks, domains))
    return tuple(found)


def user_head_passes(
    spec: GemSpec, own: UserModelSpec, schema: BatchSchema, *, width: int, examples: int, e: int
) -> Passes:
    """Elementwise work of the heads and of what the vectors of users are trained by.

    Args:
        spec: the model.
        own: what it has for users.
        schema: all inputs that it reads.
        width: of what its layers make of a user.
        examples: of a rank; every user is compared with every item of them.
        e: bytes of an element.

    Returns:
        bytes of a rank's batch.
    """
    tasks, embedding = len(schema.labels), spec.embeddings.embedding_dim
    candidate, items = _inputs(schema)
    found = example_passes(width, spec.heads.trunk_widths, examples, e)
    hidden = example_passes(candidate * embedding, (own.candidate_hidden,), examples, e)
    found.add(1, hidden.forward, hidden.backward, hidden.kept)
    found.row_norm(examples, own.width, e)
    # The vector of the user and what each task makes of the candidate, which are multiplied.
    found.add(examples * own.width, 2 * e, 3 * e, e)
    found.add(examples * tasks * (own.width + 1), 2 * e, 2 * e, e)
    # The items, and both factors of their scores in fp32.
    found.add(examples * items * embedding, 2 * e, 2 * e, e)
    copies = 1 if e == _WIDE else 2
    found.add(examples * own.width, 2 * copies * _WIDE, 2 * copies * _WIDE, copies * _WIDE)
    # Scores of all pairs: scaled, corrected, masked, then their softmax, which is kept.
    found.add(examples * examples, 8 * _WIDE + 4 * _MARK, 6 * _WIDE + _MARK, _WIDE + _MARK)
    found.add(examples * own.time_gap_knots, 4 * _WIDE, 4 * _WIDE, 2 * _WIDE)
    return found
