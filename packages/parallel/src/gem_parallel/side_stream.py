"""Work of a device beside what the current stream does: kernels on a stream of their own.

Launched in the order in which one stream would have them, so that random numbers stay the same;
only what the device waits for differs. In the backward pass each kernel runs on the stream of its
forward one, and autograd orders the two.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class SideStream:
    """A second stream of a device. On a CPU everything runs where it stands.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, *tensors: Tensor) -> "Beside":
        """Say from when on the work could run: what the current stream was given by now is done.

        Args:
            tensors: what the work reads, made on the current stream.

        Returns:
            what runs the work.
        """
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._stream.device))
        return Beside(self._stream, event, tensors)


@dataclass(frozen=True, slots=True)
class Beside:
    """Work that may run beside all that the current stream was given since it could begin.

    Attributes:
        stream: that it runs on; None on a CPU.
        event: after which it may run.
        tensors: what it reads.
    """

    stream: torch.cuda.Stream | None
    event: torch.cuda.Event | None
    tensors: tuple[Tensor, ...]

    def __call__(self, work: Callable[..., Tensor]) -> Tensor:
        """Run it, and let the current stream wait for its end.

        Args:
            work: of the tensors.

        Returns:
            what it returns, to be used on the current stream.
        """
        if self.stream is None or self.event is None:
            return work(*self.tensors)
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_event(self.event)
        with torch.cuda.stream(self.stream):
            found = work(*self.tensors)
        # The allocator knows the stream that a tensor was made on; another one still reads it when
        # the last reference is gone.
        for tensor in self.tensors:
            tensor.record_stream(self.stream)
        found.record_stream(current)
        current.wait_stream(self.stream)
        return found
