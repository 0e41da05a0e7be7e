"""One checkpoint of tables: saved under any plan on any ranks, loaded under any other.

    save_tables(engine, folder)     every rank writes the pieces that it holds
    TableSaver(engine).save(folder) the same, while training goes on
    load_tables(engine, folder)     every rank reads the pieces that it needs

A checkpoint holds weights, optimizer rows, the step and the learning rate; ``EmbeddingTables`` save
and load it too. It is a ``torch.distributed.checkpoint`` under the names
``tables.<table>.<weight or optimizer row>``, so any reader of that format can open it.

Left out: which checkpoint to keep, and the state of the dense part (both are the trainer's).
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_embeddings.checkpoint_files import Whole, agreement, copied, read, read_facts, write
from gem_embeddings.contract import TableOptimizer
from gem_embeddings.engine import TableEngine
from gem_embeddings.rules import STATE_NAMES, is_row_wise
from gem_embeddings.tables import EmbeddingTables
from gem_opkit.errors import DataError, refusal
from gem_parallel.launch import World

FORMAT = 2
_NAME = "load_tables"
_FREE = "free memory and space there"


def save_tables(engine: TableEngine, folder: Path | str) -> None:
    """Write the tables of an engine. Every rank has to call this, between two steps.

    With several sharding groups that are not fully sharded, ``sync`` comes first: a checkpoint
    holds one copy of a table, their mean. So the run goes on as one that syncs at this step.

    Args:
        engine: the tables.
        folder: of the checkpoint, on a disk that all ranks see; must not exist. It appears when
            everything in it is on disk.

    Raises:
        DataError: the folder is taken or cannot be written; every rank raises, nothing is left.

    Cost: host memory for what a rank holds, once.
    """
    engine.sync()
    state = _copy(engine, Path(folder))
    write(state, _facts(engine), Path(folder), engine.world)


def load_tables(engine: TableEngine, folder: Path | str, *, optimizer: bool = True) -> None:
    """Overwrite the tables of an engine by those of a checkpoint. Every rank has to call this.

    Args:
        engine: with tables of the same names and sizes; plan, ranks, engine and row dtype may
            differ from those that saved it. Rows of a lower precision are rounded to nearest.
        folder: of the checkpoint.
        optimizer: whether optimizer rows, step and learning rate are loaded too. Without them the
            checkpoint may be of another optimizer: to evaluate, or to begin anew.

    Raises:
        DataError: the folder, a file or a table is missing, damaged or of another size, or the
            checkpoint is of another optimizer; every rank raises, and all is as it was.

    Cost: host memory for what a rank holds, once.
    """
    folder = Path(folder)
    state = engine.table_state()
    wanted = {name: t for name, t in state.items() if optimizer or name.endswith(".weight")}
    facts: dict[str, Any] = {}

    def check() -> None:
        facts.update(_checked_facts(folder, engine.optimizer.kind if optimizer else None))

    read(wanted, folder, engine.world, check=check)
    engine.load_table_state(state)
    if optimizer:
        engine.step = int(facts["step"])
        engine.set_lr(float(facts["lr"]))


def save_plain_tables(
    tables: EmbeddingTables,
    folder: Path | str,
    optimizer: torch.optim.Optimizer,
    kind: TableOptimizer,
    *,
    world: World,
) -> None:
    """Write tables that every rank holds whole. Every rank has to call this.

    Args:
        tables: equal on all ranks.
        folder: as for ``save_tables``.
        optimizer: of the tables, made by ``table_optimizer``.
        kind: of the optimizer.
        world: the ranks.

    Raises:
        DataError: as ``save_tables``.
    """
    state = _plain_state(tables, optimizer, kind)
    facts = {
        "format": FORMAT,
        "optimizer": kind,
        "step": max((int(entry["step"]) for entry in optimizer.state.values()), default=0),
        "lr": optimizer.param_groups[0]["lr"],
    }
    with agreement(world, None, Path(folder), "be written", _FREE).step():
        host = copied(state)
    write(host, facts, Path(folder), world)


def load_plain_tables(
    tables: EmbeddingTables,
    folder: Path | str,
    optimizer: torch.optim.Optimizer | None = None,
    kind: TableOptimizer = "rowwise_adagrad",
    *,
    world: World,
) -> None:
    """Overwrite whole tables by those of a checkpoint. Every rank has to call this.

    Args:
        tables: with tables of the names and sizes in the checkpoint.
        folder: of the checkpoint.
        optimizer: whose rows, step and learning rate are loaded too; None for weights alone.
        kind: of the optimizer.
        world: the ranks.

    Raises:
        DataError: as ``load_tables``.
    """
    folder = Path(folder)
    state = _plain_state(tables, optimizer, kind)
    facts: dict[str, Any] = {}

    def check() -> None:
        facts.update(_checked_facts(folder, None if optimizer is None else kind))

    read(state, folder, world, check=check)
    if optimizer is not None:
        for entry in optimizer.state.values():
            entry["step"].fill_(int(facts["step"]))
        for group in optimizer.param_groups:
            group["lr"] = float(facts["lr"])


class TableSaver:
    """Writes checkpoints of an engine while it trains; one at a time. Use it in a ``with`` block.

    Every rank copies what it holds into host memory, then goes on; a thread writes the copy. The
    threads of all ranks talk over a process group of their own, so they cannot get in the way of
    the collectives of training.

    Args:
        engine: the tables. Every rank has to make a saver.
    """

    def __init__(self, engine: TableEngine) -> None:
        self._engine = engine
        several = engine.world.size > 1
        self._group: Any = dist.new_group(backend="gloo") if several else None
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def __enter__(self) -> "TableSaver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None and self._engine.world.size == 1:
            self._thread.join()  # on several ranks another one may be gone

    def save(self, folder: Path | str) -> None:
        """Copy the tables and write the copy. Every rank has to call this, between two steps.

        Args:
            folder: as for ``save_tables``.

        Raises:
            DataError: the checkpoint before this one could not be written.
        """
        self.wait()
        # The copy below is made of what sync has left: one that is under way must end first.
        self._engine.sync()
        given = _copy(self._engine, Path(folder)), _facts(self._engine), Path(folder)
        # A daemon: where another rank has died, its partners must not keep this process alive.
        self._thread = threading.Thread(target=self._write, args=given, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is on disk. Every rank has to call this.

        Raises:
            DataError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _write(self, state: Any, facts: Mapping[str, Any], folder: Path) -> None:
        try:
            write(state, facts, folder, self._engine.world, group=self._group)
        except BaseException as fault:  # noqa: BLE001 - raised by wait, in the thread that saves
            self._fault = fault


def _copy(engine: TableEngine, folder: Path) -> dict[str, Whole]:
    """Copy what all ranks hold into host memory, on every rank or on none."""
    state = engine.table_state()
    with agreement(engine.world, None, folder, "be copied into host memory", _FREE).step():
        return copied(state)


def _facts(engine: TableEngine) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "optimizer": engine.optimizer.kind,
        "step": engine.step,
        "lr": engine.lr,
    }


def _checked_facts(folder: Path, kind: str | None) -> dict[str, Any]:
    """What the checkpoint says of itself, where it fits an optimizer; None for no optimizer."""
    facts = read_facts(folder)
    if facts.get("format") != FORMAT:
        raise _unfit(folder, f"have format {FORMAT}", facts.get("format"), "use that version")
    if kind is not None and facts["optimizer"] != kind:
        raise _unfit(
            folder,
            f"be of the optimizer {kind}",
            facts["optimizer"],
            "use that one, or load the weights alone",
        )
    return facts


def _unfit(folder: Path, must: str, got: object, fix: str) -> DataError:
    return DataError(refusal(_NAME, str(folder), must=must, got=got, fix=fix))


def _plain_state(
    tables: EmbeddingTables, optimizer: torch.optim.Optimizer | None, kind: TableOptimizer
) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for spec, weight_RE in zip(tables.specs, tables.table_parameters(), strict=True):
        name = f"tables.{spec.name}"
        state[f"{name}.weight"] = weight_RE.detach()
        if optimizer is None:
            continue
        entry = optimizer.state[weight_RE]
        if not entry:  # before its first step; the optimizer takes it for its own then
            entry["step"] = torch.zeros((), dtype=torch.int64)
            shape = weight_RE.shape[: 1 if is_row_wise(kind) else 2]
            for key in STATE_NAMES[kind]:
                entry[key] = torch.zeros(shape, dtype=weight_RE.dtype, device=weight_RE.device)
        state |= {f"{name}.{key}": entry[key] for key in STATE_NAMES[kind]}
    return state
