"""The parts of a model that may run again in the backward pass."""

from torch import nn

from gem.model.build import expert_mixtures
from gem.model.gem import GemLayer, GemModel
from gem_opkit.errors import UnsupportedError, refusal


def check_has_regions(kind: str) -> None:
    """Refuse a kind of model that has no parts to run again, before its data are looked for.

    Args:
        kind: `model.kind` of a recipe.

    Raises:
        UnsupportedError: a kind other than `gem`.
    """
    if kind != "gem":
        raise _no_regions(kind)


def memory_regions(model: nn.Module) -> list[str]:
    """Name the parts of a model that may run again in the backward pass.

    In each layer: the summary, every stream, every expert; a profile leaves out those that do not
    run as one, as Wukong's, whose halves are summed across experts. No exchange between ranks lies
    within one of them, so ranks need not agree on what is run again.

    Args:
        model: from `gem.model.build.build_model`; sharded or not, on whatever ranks.

    Returns:
        qualified names, in the order in which the model runs them.

    Raises:
        UnsupportedError: a model of another kind.
    """
    if not isinstance(model, GemModel):
        raise _no_regions(type(model).__name__.removesuffix("Model").lower())
    mixtures = expert_mixtures(model)
    found: list[str] = []
    for place, layer in enumerate(model.layers):
        if not isinstance(layer, GemLayer):
            continue
        own = f"layers.{place}"
        found += [f"{own}.summary"] if layer.summary is not None else []
        found += [f"{own}.streams.{name}" for name, _ in layer.streams.named_children()]
        for mixture in mixtures:
            if mixture.startswith(f"{own}."):
                experts = model.get_submodule(f"{mixture}.experts")
                found += [f"{mixture}.experts.{name}" for name, _ in experts.named_children()]
    return found


def _no_regions(kind: str) -> UnsupportedError:
    return UnsupportedError(
        refusal(
            "memory",
            "model.kind",
            must='be "gem" with a memory budget or packed activations',
            got=repr(kind),
            fix="leave [memory] out, or run the batch in parts (train.accumulation_parts)",
        )
    )
