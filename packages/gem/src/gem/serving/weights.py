"""The model of an artefact, with its weights in it. Part of `gem.serving`."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gem.data.schema import BatchSchema
from gem.model.build import build_model
from gem.model.spec import DinSpec, GemSpec
from gem_opkit.errors import DataError, refusal


def model_with(
    spec: GemSpec | DinSpec, schema: BatchSchema, tensors: Mapping[str, Tensor]
) -> nn.Module:
    """Build a model around weights that are there already.

    Args:
        spec: the model.
        schema: its inputs.
        tensors: all of its weights and buffers, by name; they become its own, without a copy.

    Returns:
        the model, to evaluate with: no weight asks for a gradient.

    Raises:
        DataError: weights are missing, or are of another model.
    """
    # Rows would be drawn for nothing: where they go by their place, tables begin without memory.
    rowless = spec.embeddings.model_copy(update={"initial_rows": "by_place"})
    model = build_model(spec.model_copy(update={"embeddings": rowless}), schema, with_rows=False)
    floats = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    try:
        model.load_state_dict(floats, assign=True)
    except RuntimeError as fault:
        raise DataError(
            refusal(
                "artefact",
                "weights",
                must="be those of its model",
                got="; ".join(line.strip() for line in str(fault).splitlines()[1:4]),
                fix="export it again with this version",
            )
        ) from fault
    return model.eval().requires_grad_(requires_grad=False)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a SafeTensors file.

    Args:
        path: the file.

    Returns:
        name -> tensor, on the CPU.

    Raises:
        DataError: it is no such file.
    """
    try:
        return load_file(path)
    except SafetensorError as fault:
        raise DataError(
            refusal(
                "artefact",
                str(path),
                must="be a SafeTensors file",
                got=str(fault),
                fix="export it again",
            )
        ) from fault
