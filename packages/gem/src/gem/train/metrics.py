"""All metrics of a run, by task and domain: NE, log loss, calibration, AUC and GAUC.

A `MetricBlock` holds what is needed to compute them for a set of examples, and two blocks merge
into the block of both sets. Ranks merge their blocks, windows merge the blocks of their steps,
and a checkpoint holds blocks, so nothing is ever averaged from averages.
"""

import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem.train.auc import FRACTIONAL, AucState, AucValue, GroupedAuc
from gem.train.normalized_entropy import EntropySums

_log = logging.getLogger(__name__)

KEYS = ("ne", "auc", "gauc", "logloss", "calibration")
# Rows that a log row may sort for its GAUC: some milliseconds of it.
GAUC_LOG_ROWS = 1 << 17
TOO_MANY_ROWS = (
    f"more than {GAUC_LOG_ROWS:,} rows would have to be sorted for a log row; "
    "summary.json has the value of the whole run"
)


class MetricBlock:
    """Metric state of some examples, for every task and domain.

    Args:
        tasks: names of the labels, in the order of the columns.
        domains: names of the domains, in the order of their indices.
    """

    def __init__(self, tasks: Sequence[str], domains: Sequence[str]) -> None:
        self.tasks = tuple(tasks)
        self.domains = tuple(domains)
        self.entropy = {t: [EntropySums() for _ in self.domains] for t in self.tasks}
        self.auc = {t: [AucState() for _ in self.domains] for t in self.tasks}
        self.gauc = {t: GroupedAuc() for t in self.tasks}

    def update(
        self,
        p_BA: NDArray[np.float32],
        labels_BA: NDArray[np.float32],
        label_mask_BA: NDArray[np.bool_],
        domains_B: NDArray[np.int64],
        user_B: NDArray[np.int64],
    ) -> None:
        """Add scored examples. Unknown labels are left out.

        Args:
            p_BA: predicted probabilities in [0, 1].
            labels_BA: labels in [0, 1].
            label_mask_BA: which labels are known.
            domains_B: domain index of each example.
            user_B: user of each example.

        Raises:
            DataError: a prediction or label is outside [0, 1] or not finite.
        """
        for a, task in enumerate(self.tasks):
            known = label_mask_BA[:, a]
            p, label = p_BA[known, a], labels_BA[known, a]
            domain, user = domains_B[known], user_B[known]
            positive = label >= 0.5
            for d in range(len(self.domains)):
                here = slice(None) if len(self.domains) == 1 else domain == d
                self.entropy[task][d].update(p[here], label[here])
                self.auc[task][d].update(p[here], positive[here])
            self.gauc[task].update(user, p, positive, domain)

    def merge(self, other: "MetricBlock") -> None:
        """Add the examples of another block.

        Args:
            other: a block of the same tasks and domains, over other examples.
        """
        for task in self.tasks:
            for d in range(len(self.domains)):
                self.entropy[task][d].merge(other.entropy[task][d])
                self.auc[task][d].merge(other.auc[task][d])
            self.gauc[task].merge(other.gauc[task])

    def report(self, *, gauc: bool = True) -> dict[str, dict[str, Any]]:
        """The metrics, in the form of ``summary.json``.

        Args:
            gauc: compute GAUC whatever it costs: it sorts every row that is kept. Without it, it
                is null with that reason where there are more than ``GAUC_LOG_ROWS`` of them.

        Returns:
            task -> ``{ne, auc, gauc, logloss, calibration, examples, positives, domains ->
            name -> the same keys, null_reasons -> key -> text}``. ``notes`` -> key -> text is
            there only where a value is approximate, and says how near it is.
        """
        return {task: self._report_task(task, gauc=gauc) for task in self.tasks}

    def _report_task(self, task: str, *, gauc: bool) -> dict[str, Any]:
        grouped = self.gauc[task]
        wanted = grouped if gauc or grouped.rows <= GAUC_LOG_ROWS else None
        by_domain = {
            name: _values(self.entropy[task][d], self.auc[task][d], wanted, d)
            for d, name in enumerate(self.domains)
        }
        if len(by_domain) == 1:
            [only] = by_domain.values()
            found = dict(only)
        else:
            sums, auc = EntropySums(), AucState()
            for part, state in zip(self.entropy[task], self.auc[task], strict=True):
                sums.merge(part)
                auc.merge(state)
            found = _values(sums, auc, wanted, None)
        found["domains"] = by_domain
        return found

    def to_bytes(self) -> NDArray[np.uint8]:
        """The whole block as bytes, for another rank or a checkpoint."""
        arrays: dict[str, Any] = {}  # keyword arguments of savez, which has one of another type
        for a, task in enumerate(self.tasks):
            for d in range(len(self.domains)):
                arrays[f"{a}.{d}.entropy"] = self.entropy[task][d].to_array()
                for name, array in self.auc[task][d].to_arrays().items():
                    arrays[f"{a}.{d}.auc.{name}"] = array
            for name, array in self.gauc[task].to_arrays().items():
                arrays[f"{a}.gauc.{name}"] = array
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        return np.frombuffer(buffer.getvalue(), dtype=np.uint8)

    @classmethod
    def from_bytes(
        cls, data: NDArray[np.uint8], tasks: Sequence[str], domains: Sequence[str]
    ) -> "MetricBlock":
        """The block that ``to_bytes`` wrote.

        Args:
            data: its bytes.
            tasks: as in the block that wrote them.
            domains: as in the block that wrote them.
        """
        block = cls(tasks, domains)
        with np.load(io.BytesIO(data.tobytes()), allow_pickle=False) as arrays:
            for a, task in enumerate(block.tasks):
                for d in range(len(block.domains)):
                    block.entropy[task][d] = EntropySums.from_array(arrays[f"{a}.{d}.entropy"])
                    block.auc[task][d] = AucState.from_arrays(
                        _strip(arrays, f"{a}.{d}.auc.", AucState().to_arrays())
                    )
                block.gauc[task] = GroupedAuc.from_arrays(
                    _strip(arrays, f"{a}.gauc.", GroupedAuc().to_arrays())
                )
        return block


def _strip(
    arrays: Mapping[str, NDArray], prefix: str, names: Mapping[str, Any]
) -> dict[str, NDArray]:
    return {name: arrays[prefix + name] for name in names}


def _values(
    sums: EntropySums, auc: AucState, grouped: GroupedAuc | None, domain: int | None
) -> dict[str, Any]:
    """One set of metrics; keys in a fixed order, None with a reason where undefined."""
    found, reasons = sums.values()
    notes: dict[str, str] = {}
    areas: dict[str, AucValue] = {"auc": auc.value()}
    areas["gauc"] = AucValue(None, TOO_MANY_ROWS) if grouped is None else grouped.value(domain)
    for key, area in areas.items():
        if sums.fractional:
            area = AucValue(None, FRACTIONAL)
        found[key] = area.auc
        if area.reason is not None:
            reasons[key] = area.reason
    if found["auc"] is not None and areas["auc"].error_bound > 0.0:
        # 1.05: the two digits that are shown must not be below the bound.
        bound = 1.05 * areas["auc"].error_bound
        notes["auc"] = f"within {bound:.1e}: close scores were counted as ties"
    if grouped is not None and found["gauc"] is not None and grouped.user_fraction < 1.0:
        notes["gauc"] = f"over a {grouped.user_fraction:.3g} sample of the users"
    values: dict[str, Any] = {key: found[key] for key in KEYS}
    values["examples"] = sums.examples
    values["positives"] = sums.positives if sums.fractional else int(sums.positives)
    values["null_reasons"] = reasons
    if notes:
        values["notes"] = notes
    return values


class MetricStream:
    """Lifetime and window metrics of a run: blocks that close at every log row.

    Args:
        tasks: names of the labels.
        domains: names of the domains.
        window_blocks: how many of the newest blocks make up the window.
    """

    def __init__(self, tasks: Sequence[str], domains: Sequence[str], window_blocks: int) -> None:
        self.tasks, self.domains = tuple(tasks), tuple(domains)
        self.window_blocks = window_blocks
        self.lifetime = MetricBlock(tasks, domains)
        self.current = MetricBlock(tasks, domains)
        self.recent: list[MetricBlock] = []

    def close(self, merged: MetricBlock) -> None:
        """End the current block.

        Args:
            merged: the current block of every rank, merged; on one rank ``self.current``.
        """
        self.lifetime.merge(merged)
        self.recent = [*self.recent, merged][-self.window_blocks :]
        self.current = MetricBlock(self.tasks, self.domains)

    def window(self) -> MetricBlock:
        """The newest closed blocks, merged."""
        window = MetricBlock(self.tasks, self.domains)
        for block in self.recent:
            window.merge(block)
        return window

    def state(self, current: MetricBlock) -> dict[str, NDArray[np.uint8]]:
        """Bytes of every block, by name.

        Args:
            current: the current block of every rank, merged; on one rank ``self.current``.
        """
        blocks = {f"window_{i}": block.to_bytes() for i, block in enumerate(self.recent)}
        return {"lifetime": self.lifetime.to_bytes(), "current": current.to_bytes(), **blocks}

    def load_state(self, state: Mapping[str, NDArray[np.uint8]], *, keep_current: bool) -> None:
        """Continue from what ``state`` returned.

        Args:
            state: name -> bytes.
            keep_current: load the current block as well: True on exactly one rank, as the saved
                block holds the examples of all.
        """
        read = {k: MetricBlock.from_bytes(v, self.tasks, self.domains) for k, v in state.items()}
        self.lifetime = read.pop("lifetime")
        current = read.pop("current")
        self.current = current if keep_current else MetricBlock(self.tasks, self.domains)
        self.recent = [read[f"window_{i}"] for i in range(len(read))]
