"""How factors of products in MXFP8 are rounded, where that is not to the nearest alone."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rounding:
    """Of one layer.

    Attributes:
        stochastic: gradients are rounded up or down by chance.
        hadamard_seed: signs of the rotation in front of rounding; None does not rotate. It stays
            what it is, so that an evaluation gives the same numbers every time.
    """

    stochastic: bool = False
    hadamard_seed: int | None = None

    def seed(self) -> int | None:
        """Draw the seed of a call's gradients on the host; None where none are rounded by chance.

        From torch's default generator, where gradients are recorded: an evaluation draws nothing.
        """
        if not self.stochastic or not torch.is_grad_enabled():
            return None
        return int(torch.randint(2**62, ()))


NEAREST = Rounding()
