"""The tensors of a run by their names in a checkpoint, on one rank or spread over many.

The names are those of a single process, whatever the plan. Of a sharded tensor a rank has pieces,
which torch's checkpoint writes and reads one by one; so any plan reads what any other has written.

    model/<name>                     weights and buffers; tables as `EmbeddingTables` names them
    ema/<name>                       averages of dense weights
    <optimizer>/<parameter>/<key>    optimizer rows
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gem.model.sharded_tables import ShardedTables
from gem_embeddings.checkpoint_files import Whole
from gem_embeddings.engine import TableEngine
from gem_embeddings.pieces import local_pieces
from gem_opkit.errors import DataError, refusal
from gem_precision.gathered import trained_numbers


def engine_of(model: nn.Module) -> TableEngine | None:
    """The engine that holds the tables of a model; None where they are parameters.

    Args:
        model: any.
    """
    tables = getattr(model, "tables", None)
    return tables.engine if isinstance(tables, ShardedTables) else None


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers of a model, tables too, in the memory of the model.

    Args:
        model: its sharded parameters must not be gathered.

    Returns:
        ``model/<name>`` -> tensor, or DTensor of which this rank has a part.

    Raises:
        DataError: the model's state holds something that is no tensor.
    """
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise DataError(
                refusal(
                    "checkpoint",
                    f"model state {name}",
                    must="be a tensor",
                    got=type(value).__name__,
                    fix="register it as a buffer",
                )
            )
        found[f"model/{name}"] = trained_numbers(value)
    rows = {n: t for n, t in table_tensors(model).items() if n.startswith("model/")}
    return {**found, **rows}


def table_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Rows and optimizer rows of tables that an engine holds, in its memory.

    Args:
        model: any.

    Returns:
        name in a checkpoint -> tensor; none where tables are parameters.
    """
    tables = getattr(model, "tables", None)
    if not isinstance(tables, ShardedTables):
        return {}
    state = tables.engine.table_state()
    found: dict[str, Tensor] = {}
    for table, key in tables.keys.items():
        prefix = f"tables.{table}."
        for name, tensor in state.items():
            if name.startswith(prefix):
                found[_place(key, name.removeprefix(prefix))] = tensor
    return found


def table_steps(model: nn.Module) -> dict[str, Tensor]:
    """Steps of every table that an engine holds, as table optimizers keep them.

    Args:
        model: any.
    """
    tables = getattr(model, "tables", None)
    if not isinstance(tables, ShardedTables):
        return {}
    step = torch.tensor(tables.engine.step, dtype=torch.int64)
    return {_place(key, "step"): step for key in tables.keys.values()}


def _place(key: str, kind: str) -> str:
    name = f"tables.weights.{key}"
    return f"model/{name}" if kind == "weight" else f"tables/{name}/{kind}"


def copied(tensor: Tensor, *, copy: bool) -> Tensor:
    """What this rank holds of a tensor, in host memory.

    Args:
        tensor: plain or a DTensor.
        copy: whether a plain tensor in host memory is copied too. Parts always are.

    Returns:
        what torch's checkpoint writes of it.
    """
    if isinstance(tensor, DTensor):
        return Whole.of(tensor, copy=True)
    return tensor.detach().to(torch.device("cpu"), copy=copy)


def room_for(live: Tensor | None, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Host memory for what this rank reads of a stored tensor.

    Args:
        live: what it will be copied into; None for nothing that is there by now.
        size: of the whole.
        dtype: as stored.

    Returns:
        what torch's checkpoint reads into.
    """
    if isinstance(live, DTensor) and live.shape == size:
        return Whole.of(live, copy=False)
    return torch.empty(size, dtype=dtype)


@torch.no_grad()
def take_over(live: Tensor, loaded: Tensor) -> None:
    """Copy what was read into its place.

    Args:
        live: overwritten, of this rank what it holds.
        loaded: from `room_for` the same tensor.
    """
    if isinstance(loaded, Whole):
        for own, piece in zip(local_pieces(live), loaded.local_shards(), strict=True):
            own.values.copy_(piece)
    else:
        live.copy_(loaded)


def optimizer_tensors(
    kind: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What an optimizer keeps, by name.

    Args:
        kind: name of the optimizer.
        optimizer: it.
        names: id of a parameter -> its name in the model.

    Returns:
        ``<kind>/<parameter>/<key>`` -> tensor; and ``<parameter>/<key>`` -> number.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, float] = {}
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            place = f"{names[id(parameter)]}/{key}"
            if isinstance(value, Tensor):
                tensors[f"{kind}/{place}"] = value
            else:
                scalars[place] = value
    return tensors, scalars


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, float],
) -> None:
    """Continue an optimizer.

    Args:
        optimizer: freshly made.
        names: id of a parameter -> its name in the model.
        tensors: ``<parameter>/<key>`` -> what was read; of parameters that this rank has.
        scalars: ``<parameter>/<key>`` -> number; those of other parameters are left out.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    index = {names[id(p)]: place for place, p in enumerate(parameters)}
    entries: dict[int, dict[str, Any]] = {}
    for place, value in {**tensors, **scalars}.items():
        name, _, key = place.rpartition("/")
        if name not in index:
            continue
        if isinstance(value, Whole):
            part = torch.empty_like(parameters[index[name]])
            take_over(part, value)
            value = part
        entries.setdefault(index[name], {})[key] = value
    # The groups stay those of this run: the config is equal, and rates follow from the step.
    optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
