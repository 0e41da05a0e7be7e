"""What the operators on flat tables refuse, before anything runs. Private."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_embeddings.table_layout import POOLINGS, SLOT, TableLayout
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, refusal

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_lookup(
    op: str,
    weights_N: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    layout: TableLayout,
    counts: Sequence[int],
    id_weights_I: Tensor | None,
    *,
    grad: Tensor | None = None,
) -> None:
    """Refuse tensors that do not fit together; reads no value of a tensor."""
    named = {"weights_N": weights_N, "ids_I": ids_I, "bags_O": bags_O}
    if id_weights_I is not None:
        named["id_weights_I"] = id_weights_I
    if grad is not None:
        named["grad"] = grad
    for name, tensor in named.items():
        if tensor.ndim != 1:
            _shape(op, name, "have one dim", tuple(tensor.shape), "flatten it")
        if tensor.device != weights_N.device:
            raise DeviceError(
                refusal(
                    op,
                    name,
                    must=f"be on {weights_N.device} like weights_N",
                    got=tensor.device,
                    fix="move it",
                )
            )
    _one_of(op, "weights_N", weights_N.dtype, _FLOATS)
    for name in ("ids_I", "bags_O"):
        _one_of(op, name, named[name].dtype, (torch.int64, torch.int32))
    for name in ("id_weights_I", "grad"):
        if name in named:
            _one_of(op, name, named[name].dtype, _FLOATS)
    if not weights_N.is_contiguous():
        _shape(op, "weights_N", "be contiguous", f"stride {weights_N.stride()}", "copy it")
    features, need = len(layout.features), layout.elements
    if weights_N.shape[0] < need:
        _shape(op, "weights_N", f"hold the {need} elements of the layout", weights_N.shape[0])
    if len(counts) != features:
        _shape(op, "counts", f"have one count for each of {features} features", len(counts))
    total = sum(counts)
    if ids_I.shape[0] != total or any(count < 0 for count in counts):
        _shape(op, "ids_I", f"have {total} ids, the sum of counts", ids_I.shape[0])
    if bags_O.shape[0] < 1 or (bags_O.shape[0] - 1) % max(1, features):
        _shape(
            op, "bags_O", f"have F·B + 1 offsets for {features} features", bags_O.shape[0],
            "give every feature equally many bags",
        )  # fmt: skip
    if total and bags_O.shape[0] == 1:
        _shape(op, "bags_O", f"have a bag for {total} ids", "none", "give one bag a feature")
    if id_weights_I is not None and id_weights_I.shape[0] != total:
        _shape(
            op, "id_weights_I", f"have one weight for each of {total} ids", id_weights_I.shape[0]
        )
    if grad is not None:
        batch = (bags_O.shape[0] - 1) // max(1, features)
        size = sum(rows * width for rows, width in layout.output_shapes(batch, counts))
        if grad.shape[0] != size:
            _shape(op, "grad", f"have the {size} elements of the flat output", grad.shape[0])


def check_bags(op: str, bags_O: Tensor, slots: Sequence[int], counts: Sequence[int]) -> None:
    """Refuse bags that do not share out the ids of their pooled feature, on a CPU.

    Elsewhere a look at them would make the host wait.
    """
    if bags_O.device.type != "cpu" or not counts:
        return
    batch, first = (bags_O.shape[0] - 1) // len(counts), 0
    for index, count in enumerate(counts):
        own_O = bags_O[index * batch : (index + 1) * batch + 1]
        if POOLINGS[slots[SLOT * index + 4]] != "none":
            ends = int(own_O[0]), int(own_O[-1])
            if batch and ends != (first, first + count):
                _shape(
                    op,
                    "bags_O",
                    f"run from {first} to {first + count} for feature {index}",
                    f"{ends[0]} to {ends[1]}",
                    "count ids over all features",
                )
            if bool((own_O.diff() < 0).any()):
                _shape(op, "bags_O", "never fall", f"a fall in feature {index}", "sort the ids")
        first += count


def check_out_dtype(op: str, dtype: torch.dtype) -> None:
    """Refuse an output that is not floating point."""
    _one_of(op, "out_dtype", dtype, _FLOATS)


def _shape(op: str, name: str, must: str, got: object, fix: str = "check the layout") -> None:
    raise ShapeError(refusal(op, name, must=must, got=got, fix=fix))


def _one_of(op: str, name: str, dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> None:
    if dtype not in allowed:
        words = ", ".join(str(x) for x in allowed)
        raise DtypeError(refusal(op, name, must=f"be one of {words}", got=dtype, fix="convert it"))
