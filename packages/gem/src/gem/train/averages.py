"""Averages of the dense weights over the steps of a run, and evaluation by them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gem.train.local_tensors import local_part, local_parts, put_parameters_back


@torch.no_grad()
def move_averages(
    ema: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float, step: int
) -> None:
    """Move averages towards the weights of a step.

    Args:
        ema: name -> average, of this rank; moved in place.
        weights: name -> weight; has the names of the averages.
        decay: a step, in (0, 1). The first steps count for less than it says, or the average would
            remember the initial weights for the first 1 / (1 - decay) steps.
        step: 0-based step of the run.
    """
    decay = min(decay, (1.0 + step) / (10.0 + step))
    torch._foreach_lerp_(
        local_parts(ema.values()), local_parts(weights[name] for name in ema), 1.0 - decay
    )


@contextmanager
def averaged_weights(model: nn.Module, ema: Mapping[str, Tensor]) -> Iterator[None]:
    """Put the averaged dense weights into the model for the length of a ``with`` block.

    Args:
        model: its parameters have the names in ``ema``.
        ema: name -> average; empty leaves the model as it is.
    """
    put_parameters_back(model)
    parameters = dict(model.named_parameters())
    own = {name: local_part(parameters[name].detach()) for name in ema}
    kept = {name: value.clone() for name, value in own.items()}
    try:
        with torch.no_grad():
            for name, average in ema.items():
                own[name].copy_(local_part(average))
        yield
    finally:
        put_parameters_back(model)
        with torch.no_grad():
            for name, value in kept.items():
                own[name].copy_(value)
