"""From a `ModelSpec` to a module."""

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gem.data.schema import BatchSchema
from gem.model.din import DinModel
from gem.model.expert_kinds import CrossExpert, DotExpert, MlpExpert
from gem.model.gem import GemLayer, GemModel
from gem.model.interaction import AttentiveProjection, ExpertMixture, FactorisationBlock
from gem.model.spec import DinSpec, GemSpec
from gem.model.tables import draw_by_place, table_specs
from gem_embeddings.contract import LookupSpec, TableSpec
from gem_embeddings.tables import EmbeddingTables
from gem_opkit.errors import UnsupportedError, refusal
from gem_parallel.side_stream import SideStream


def build_model(
    spec: GemSpec | DinSpec, schema: BatchSchema, *, seed: int = 0, with_rows: bool = True
) -> nn.Module:
    """Build the model that a recipe names.

    Parameters are drawn from torch's default generator: call `torch.manual_seed` before.

    Args:
        spec: the model, of either kind.
        schema: inputs, tasks and domains of the data set.
        seed: of the rows of tables, where the spec has them drawn by their place.
        with_rows: False leaves such tables on the meta device, without memory, for somebody who
            puts others in their place.

    Returns:
        a module with `forward(batch: ExampleBatch) -> logits_BA` (fp32) and `tables`, whose
        parameters the table optimizer trains; every other parameter is dense.

    Raises:
        ConfigError: spec and schema contradict each other.
        UnsupportedError: the schema has an input that no layer reads.
    """
    model = GemModel(spec, schema) if isinstance(spec, GemSpec) else DinModel(spec, schema)
    if with_rows and spec.embeddings.initial_rows == "by_place":
        draw_by_place(cast(EmbeddingTables, model.tables), seed)
    return model


def model_tables(model: nn.Module) -> tuple[list[TableSpec], list[LookupSpec]]:
    """Describe the tables that a model looks up, wherever their rows are.

    Args:
        model: from `build_model`.

    Returns:
        the tables and their lookups, in the order in which the model made them.
    """
    own = cast(GemModel | DinModel, model)
    streams = own.read if isinstance(own, GemModel) else own.schema.streams
    return table_specs(own.spec.embeddings, own.schema, streams)


def only_multiplies_vectors(model: nn.Module) -> bool:
    """Tell whether a model reads each vector of its tables once, and by a product alone.

    Under autocast such a model rounds them before anything else is done with them.

    Args:
        model: from `build_model`.
    """
    return cast(GemModel | DinModel, model).only_multiplies_vectors


def dense_units(model: nn.Module) -> list[str]:
    """Name the submodules whose dense parameters are gathered together: tokenisers, layers, heads.

    Experts hold most parameters of a layer and run behind its streams: as a unit of their own they
    are gathered while the streams run.

    Args:
        model: from `build_model`.

    Returns:
        qualified names, in the order in which the model runs them.
    """
    units: list[str] = []
    for name, child in model.named_children():
        if name == "tables":
            continue
        parts = (
            [f"{name}.{key}" for key, _ in child.named_children()]
            if isinstance(child, nn.ModuleList | nn.ModuleDict)
            else [name]
        )
        units += [
            part for part in parts if any(True for _ in model.get_submodule(part).parameters())
        ]
    mixtures = expert_mixtures(model)
    return [
        name
        for unit in units
        for name in (unit, *(m for m in mixtures if m.startswith(f"{unit}.")))
    ]


def overlap_sides(model: nn.Module, device: torch.device) -> None:
    """Let the experts of a model's transformer layers run on a stream of their own.

    They read nothing that the streams of events make there. Not for experts whose parameters are
    gathered: FSDP gives memory back without waiting for a second stream.

    Args:
        model: from `build_model`; one without such layers stays as it is.
        device: that it runs on; nothing changes on a CPU.
    """
    side = SideStream(device)
    for part in model.modules():
        if isinstance(part, GemLayer):
            part.side = side


def refuse_cut_sides(model: nn.Module) -> None:
    """Refuse experts that run beside the streams and have parameters that are cut over ranks.

    Args:
        model: whose parameters have been cut by now.

    Raises:
        UnsupportedError: names one of them.
    """
    for name, part in model.named_modules():
        if not isinstance(part, GemLayer) or part.side is None or part.kind != "transformer":
            continue
        for own, parameter in part.experts.named_parameters():
            if isinstance(parameter, DTensor):
                raise UnsupportedError(
                    refusal(
                        "recipe",
                        "parallel.overlap_sides",
                        must="be false where parameters beside the experts are gathered: their "
                        "memory is given back without waiting for a second stream",
                        got=f"true, and {name}.experts.{own} with {parameter.numel()} elements",
                        fix="leave it out, or raise parallel.replicate_below above that",
                    )
                )


def expert_mixtures(model: nn.Module) -> list[str]:
    """Name the submodules whose experts ranks may share out.

    Args:
        model: from `build_model`.

    Returns:
        qualified names; none for a model without experts.
    """
    return [name for name, part in model.named_modules() if isinstance(part, ExpertMixture)]


def example_layers(model: nn.Module) -> list[str]:
    """Name the submodules whose linear layers have one row an example: in experts, and heads.

    Args:
        model: from `build_model`.

    Returns:
        qualified names.
    """
    found = ["heads"]
    for name, part in model.named_modules():
        if isinstance(part, FactorisationBlock | AttentiveProjection | DotExpert | MlpExpert):
            found.append(f"{name}.mlp")
        elif isinstance(part, CrossExpert):
            found.append(f"{name}.cross")
    return found


def late_layers(model: nn.Module) -> list[str]:
    """Name the submodules that a low precision leaves alone by default: heads and last layer.

    Args:
        model: from `build_model`.

    Returns:
        qualified names.
    """
    last = len(model.layers) - 1 if isinstance(model, GemModel) else None
    return ["heads", *([] if last is None else [f"layers.{last}"])]
