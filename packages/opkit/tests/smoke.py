"""Run one operator with only this package's wheel installed; exit status 1 if it is wrong."""

import sys

import torch
from torch import Tensor

from gem_opkit.cost import Cost, register_flops
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ShapeError
from gem_opkit.impl import resolve_impl


@torch.library.custom_op("gem_opkit_smoke::scale", mutates_args=())
def scale(values_TD: Tensor, gain_D: Tensor) -> Tensor:
    return values_TD * gain_D


register_flops(scale, lambda values_TD, gain_D: Cost(values_TD.numel(), 0))


def main() -> int:
    from torch.utils.flop_counter import FlopCounterMode

    values_TD, gain_D = torch.ones(4, 2), torch.tensor([2.0, 3.0])
    check_shapes("scale", values_TD=values_TD, gain_D=gain_D)
    try:
        check_shapes("scale", values_TD=values_TD, gain_D=torch.ones(3))
    except ShapeError:
        refused = True
    else:
        refused = False
    with FlopCounterMode(display=False) as counter:
        scaled_TD = scale(values_TD, gain_D)
    right = torch.equal(scaled_TD, torch.tensor([[2.0, 3.0]] * 4))
    chosen = resolve_impl("auto", values_TD.device, "scale", has_triton=False)
    return (
        0 if right and refused and counter.get_total_flops() == 8 and chosen == "reference" else 1
    )


if __name__ == "__main__":
    sys.exit(main())
