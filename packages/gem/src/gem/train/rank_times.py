"""What each rank does on its own, and how even that is: rows of the log for several ranks.

The units of the model are timed in their forward passes, which hold no collective: a rank that is
slow there makes all others wait. Mixtures of experts are left out, as their inputs may travel and
their weights may still be on the way; where they are compiled, neither is so, and they count with
their layer. On CUDA events are recorded and read where the log waits for
the device anyway.
"""

import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gem.data.batch import ExampleBatch
from gem.model.build import dense_units
from gem.train.rank_group import RankGroup
from gem.train.straggler_spec import StragglerSpec
from gem_parallel.balance.stragglers import Straggler, StragglerWatch
from gem_parallel.balance.work import max_over_mean
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.launch import World


class OwnTime:
    """Times the forward passes of a model's units while it trains.

    Args:
        model: from `gem.model.build.build_model`, wrapped already.
        device: where it runs.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._ms = 0.0
        self._since: float | torch.cuda.Event | None = None
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        units = dense_units(model)
        for name in units:
            unit = model.get_submodule(name)
            if any(name.startswith(f"{other}.") for other in units):
                # A mixture inside a layer: before what gathers its weights, and after it.
                unit.register_forward_pre_hook(self._pause, prepend=True)
                unit.register_forward_hook(self._go_on)
            else:
                unit.register_forward_pre_hook(self._go_on)  # behind what gathers its weights
                unit.register_forward_hook(self._pause)

    def _go_on(self, module: nn.Module, *_: object) -> None:
        if module.training:
            self._since = self._now()

    def _pause(self, module: nn.Module, *_: object) -> None:
        since, self._since = self._since, None
        if not module.training or since is None:
            return
        now = self._now()
        if isinstance(now, float) and isinstance(since, float):
            self._ms += 1e3 * (now - since)
        elif isinstance(now, torch.cuda.Event) and isinstance(since, torch.cuda.Event):
            self._spans.append((since, now))

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take_ms(self) -> float:
        """Milliseconds since the last call. Waits for the device where events are not over yet."""
        if self._spans:
            self._spans[-1][1].synchronize()
        taken = self._ms + sum(begin.elapsed_time(end) for begin, end in self._spans)
        self._ms, self._spans = 0.0, []
        return taken


class StepWorks:
    """Work of this rank in the steps since the last row."""

    def __init__(self) -> None:
        self.flops: list[int] = []
        self._dealt: list[tuple[float | None, ...]] = []

    def add(self, batch: ExampleBatch, flops: int) -> None:
        """Note a step.

        Args:
            batch: this rank's share of it.
            flops: what it costs the model.
        """
        self.flops.append(flops)
        if batch.work is not None:
            work = batch.work
            self._dealt.append((work.ranks_before, work.parts_before, work.parts, work.moved_frac))

    def means(self) -> list[float]:
        """Means over steps of what dealing says: ranks before, parts before and after, moved.

        Returns:
            four numbers; NaN where nothing is known.
        """
        columns = zip(*self._dealt, strict=True) if self._dealt else [()] * 4
        means: list[float] = []
        for column in columns:
            known = [value for value in column if value is not None]
            means.append(sum(known) / len(known) if known else float("nan"))
        return means

    def clear(self) -> None:
        """Begin the next row."""
        self.flops.clear()
        self._dealt.clear()


class RankRows:
    """The parts of a row that compare ranks.

    Args:
        model: that is trained, wrapped already.
        world: the ranks.
        spec: which ranks are named.
    """

    def __init__(self, model: nn.Module, world: World, spec: StragglerSpec) -> None:
        self._world = world
        self._hosts: list[str] = RankGroup(world).gather(socket.gethostname())
        self._own = OwnTime(model, world.device) if world.size > 1 else None
        self._watch = None
        if world.size > 1 and spec.rows:
            self._watch = StragglerWatch(spec.ratio, spec.rows)

    def row(self, works: StepWorks, data_ms: float, step_ms: float) -> dict[str, Any]:
        """Compare the ranks since the last row. Every rank has to call this.

        Args:
            works: of this rank; begun anew.
            data_ms: time that this rank waited for its data.
            step_ms: time of all steps together.

        Returns:
            ``balance``, ``compute_ms`` and ``stragglers``, as docs/balance.md has them; nothing
            on one rank, unless its micro-batches are balanced.
        """
        means, steps = works.means(), max(len(works.flops), 1)
        compute_ms = self._own.take_ms() if self._own is not None else 0.0
        told_WD = self._gather([compute_ms, data_ms, *means, *works.flops])
        works.clear()
        flops_WD = told_WD[:, 6:]
        known = [None if column.isnan().any() else column.mean() for column in told_WD[:, 2:6].T]
        before, parts_before, parts, moved = (None if x is None else float(x) for x in known)
        if self._world.size == 1:
            if parts is None:
                return {}
            return {"balance": {"parts_before": parts_before, "parts": parts}}
        ratios = [max_over_mean(step_W.numpy()) for step_W in flops_WD.T] or [1.0]
        compute_W = told_WD[:, 0] / steps
        found: list[Straggler] = []
        if self._watch is not None:
            found = self._watch.judge(
                told_WD[:, 0].tolist(),
                flops_WD.sum(1).tolist(),
                told_WD[:, 1].tolist(),
                step_ms,
                steps=steps,
            )
        return {
            "balance": {
                "before": before,
                "max_over_mean": sum(ratios) / len(ratios),
                "worst": max(ratios),
                "parts_before": parts_before,
                "parts": parts,
                "moved_frac": moved,
            },
            "compute_ms": {"mean": float(compute_W.mean()), "max": float(compute_W.max())},
            "stragglers": [
                {
                    "rank": one.rank,
                    "host": self._hosts[one.rank],
                    "cause": one.cause,
                    "ratio": one.ratio,
                    "rows": one.rows,
                }
                for one in found
            ],
        }

    def news(self, stragglers: Sequence[dict[str, Any]]) -> list[str]:
        """Lines about ranks that have just become stragglers.

        Args:
            stragglers: of the newest row.
        """
        watch = self._watch
        return [_told(one) for one in stragglers if watch is not None and watch.is_new(one["rows"])]

    def _gather(self, own: Sequence[float]) -> Tensor:
        told_WD = torch.zeros(self._world.size, len(own), dtype=torch.float64)
        told_WD[self._world.rank] = torch.tensor(own, dtype=torch.float64)
        return all_reduce_sum(told_WD.to(self._world.device), self._world).cpu()


def _told(one: dict[str, Any]) -> str:
    who = f"rank {one['rank']} on host {one['host']}"
    rows = f"in {one['rows']} row{'' if one['rows'] == 1 else 's'} of the log"
    if one["cause"] == "data":
        return (
            f"warning: {who} waits for its data: with that its steps take {one['ratio']:.2f} times "
            f"as long {rows}; all other ranks wait for it"
        )
    return (
        f"warning: {who} is slow: it computes {one['ratio']:.2f} times as long as the others "
        f"{rows}; all other ranks wait for it"
    )
