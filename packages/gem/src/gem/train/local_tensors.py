"""What this rank holds of tensors, some of which may be sharded over ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gem_precision.gathered import trained_numbers


def local_part(tensor: Tensor) -> Tensor:
    """View the part of a tensor that lies on this rank; a plain tensor is all its part.

    Args:
        tensor: plain, or a DTensor.
    """
    return trained_numbers(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """View the parts of some tensors, without gradients.

    Args:
        tensors: plain or DTensors.
    """
    with torch.no_grad():
        return [local_part(tensor.detach()) for tensor in tensors]


def put_parameters_back(model: nn.Module) -> None:
    """Let a model's parameters be the shards of this rank again after a forward pass alone.

    A forward pass without a backward pass may leave gathered copies behind, which the next one
    would read whatever the shards have become since.

    Args:
        model: sharded or not.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
