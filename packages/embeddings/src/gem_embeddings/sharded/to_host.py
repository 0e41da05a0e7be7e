"""Numbers on their way from a device to the host, which need not wait for them meanwhile."""

import torch
from torch import Tensor


class ToHost:
    """A short tensor that the host will read later.

    Args:
        numbers: on any device.

    Attributes:
        waited: whether the numbers had not come when they were read.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.waited = False
        self._there: torch.cuda.Event | None = None
        if numbers.device.type != "cuda":
            self._host = numbers.cpu()
            return
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._host.copy_(numbers, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record()

    def read(self) -> Tensor:
        """Return the numbers, on the host; waits for the device where they have not come yet."""
        if self._there is not None:
            self.waited = not self._there.query()
            self._there.synchronize()
        return self._host
