"""When the collectives of a step run, and what of them the compute waits for.

Compute is one queue; the links inside hosts and the adapters are one queue each. A unit's forward
pass waits for its parameters, which are gathered some units ahead of their use; its gradients are
reduced behind its backward pass. Activations of experts are waited for at once, and
share their links with what these carry meanwhile; where experts run beside the unit before them,
its compute goes on while they travel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective with its time.

    Attributes:
        queue: links that it keeps busy.
        ms: how long.
    """

    queue: str
    ms: float


@dataclass(frozen=True, slots=True)
class Segment:
    """What one unit does in one pass.

    Attributes:
        compute_ms: its compute.
        before: gathers that its compute waits for; they may run ahead of it.
        within: collectives that its compute waits for and that cannot run ahead.
        after: reductions that begin when its compute has ended.
        free_ms: of the compute, what waits for nothing ``within`` and goes on meanwhile.
    """

    compute_ms: float
    before: Sequence[Transfer] = ()
    within: Sequence[Transfer] = ()
    after: Sequence[Transfer] = ()
    free_ms: float = 0.0


@dataclass(slots=True)
class Queues:
    """When each queue is free again, milliseconds from the start of the step."""

    compute: float = 0.0
    links: dict[str, float] = field(default_factory=dict)

    def transfer(self, transfer: Transfer, ready: float) -> float:
        """Put a collective at the end of its queue.

        Args:
            transfer: the collective.
            ready: when what it gives is there.

        Returns:
            when it ends.
        """
        start = max(ready, self.links.get(transfer.queue, 0.0))
        self.links[transfer.queue] = start + transfer.ms
        return start + transfer.ms

    def transfer_now(self, transfer: Transfer, ready: float) -> float:
        """Run a collective that compute waits for beside what its links carry already.

        Both then go at half speed, until one of them is done.

        Args:
            transfer: the collective.
            ready: when what it gives is there.

        Returns:
            when it ends.
        """
        free = self.links.get(transfer.queue, 0.0)
        shared = min(transfer.ms, max(0.0, free - ready))
        self.links[transfer.queue] = max(free, ready) + transfer.ms
        return ready + transfer.ms + shared


def run(segments: Sequence[Segment], queues: Queues, prefetch: int) -> None:
    """Run segments one after the other.

    Args:
        segments: in the order of their compute.
        queues: state of all queues; left as they are when the last segment's compute has ended.
        prefetch: segments whose gathers may run before the compute of their own turn.
    """
    # Of each segment's gathers: links -> when the last one on them ends.
    gathered: list[dict[str, float]] = [{} for _ in segments]

    def gather(index: int, ready: float) -> None:
        if index < len(segments):
            for each in segments[index].before:
                gathered[index][each.queue] = queues.transfer(each, ready)

    for index in range(prefetch):
        gather(index, queues.compute)
    for index, segment in enumerate(segments):
        if prefetch == 0:
            gather(index, queues.compute)
        start = max([queues.compute, *gathered[index].values()])
        if prefetch > 0:
            gather(index + prefetch, start)
        free_until = start + segment.free_ms
        for each in segment.within:
            # What runs on the same links beyond this moment ends later by as much.
            for ahead in gathered[index + 1 :]:
                if ahead.get(each.queue, 0.0) > start:
                    ahead[each.queue] += each.ms
            start = queues.transfer_now(each, start)
        # Both sides share one device: what waits for nothing fills it while the rest travels.
        queues.compute = max(start, free_until) + segment.compute_ms - segment.free_ms
        for each in segment.after:
            queues.transfer(each, queues.compute)


def end(queues: Queues) -> float:
    """When every queue is empty.

    Args:
        queues: their state.

    Returns:
        milliseconds from the start of the step.
    """
    return max([queues.compute, *queues.links.values()])
