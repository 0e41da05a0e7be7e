"""What one rank gives to its collectives, call by call. Torch-free."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sent:
    """One call of a collective.

    Attributes:
        axis: of the mesh, or ``world`` for all ranks.
        collective: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or barrier.
        bytes: what this rank gives to it, its own share included.
        section: what ran: forward, backward, tables, optimizer, ...
    """

    axis: str
    collective: str
    bytes: int
    section: str


@dataclass
class Ledger:
    """The calls of one rank, in order.

    Attributes:
        sent: every call since the last `take`.
        section: what later calls are booked under.
    """

    sent: list[Sent] = field(default_factory=list)
    section: str = ""
    _silent: bool = False

    def add(self, axis: str, collective: str, given_bytes: int) -> None:
        """Book a call.

        Args:
            axis: of the mesh.
            collective: its name.
            given_bytes: what this rank gives.
        """
        if not self._silent:
            self.sent.append(Sent(axis, collective, given_bytes, self.section))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Book nothing for the length of a ``with`` block.

        Yields:
            nothing; what is given meanwhile is booked nowhere.
        """
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def take(self) -> list[Sent]:
        """Return the calls so far and begin anew.

        Returns:
            the calls, in order.
        """
        taken, self.sent = self.sent, []
        return taken


def totals(
    sent: list[Sent], keep: Callable[[Sent], bool] = lambda call: True
) -> dict[tuple[str, str], int]:
    """Add up bytes.

    Args:
        sent: calls.
        keep: which of them count.

    Returns:
        (axis, collective) -> bytes, sorted; what carries nothing (a barrier) is left out.
    """
    found: dict[tuple[str, str], int] = {}
    for call in sent:
        if keep(call) and call.bytes:
            key = (call.axis, call.collective)
            found[key] = found.get(key, 0) + call.bytes
    return dict(sorted(found.items()))
