"""What of a request is the same for all of its candidates. Torch-free.

Two things can make an event differ from candidate to candidate: a number of it that compares it
with the candidate, which the data section declares, and a layer in which events read a summary of
all inputs, the candidate's among them, which the model declares.
"""

from gem.data.features import DataSpec
from gem.data.statistics.spec import EventStatistic
from gem.model.spec import DinSpec, GemSpec
from gem.model.structure import context_is_of_user

# Weights that look at the event alone.
_OF_THE_EVENT = frozenset({"rank", "time", "window"})


def one_history(data: DataSpec, stream: str) -> bool:
    """Whether the events of a stream are the same numbers for all candidates of a request.

    Args:
        data: the recipe's section.
        stream: its name.

    Returns:
        False where a statistic of its events is about event and candidate together.
    """
    for spec in data.statistics:
        if not isinstance(spec, EventStatistic) or spec.feedback.stream != stream:
            continue
        if spec.value == "pair":
            return False
        if spec.value == "weight" and any(w.kind not in _OF_THE_EVENT for w in spec.weights):
            return False
    return True


def streams_told_apart(model: GemSpec | DinSpec, stream: str) -> str | None:
    """Say from where on the events of a stream are computed for each candidate by itself.

    Args:
        model: the model.
        stream: name of a stream that it reads.

    Returns:
        None where the whole stream side runs once a request, but for queries that the candidate
        makes; else the layer and the part of it, for people.
    """
    if isinstance(model, DinSpec):
        return "target attention (an MLP of each event with each candidate)"
    if context_is_of_user(model):
        return None
    own = model.stream_spec(stream)
    for index, kind in enumerate(model.layers):
        if own.layers is not None and index not in own.layers:
            continue
        if kind == "transformer" and model.transformer_gate:
            return f"layer {index}: the gate behind self-attention reads all inputs"
        if kind != "transformer" and own.ffn == "gdpa":
            return f"layer {index}: GDPA-PFFN reads all inputs"
    return None
