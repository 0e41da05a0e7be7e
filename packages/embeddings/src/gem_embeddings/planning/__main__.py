"""Print the plan of the tables that a file describes.

    python -m gem_embeddings.planning TABLES.toml [--gpus N] [--most-tables N] [--json]

The file holds a ``PlanningFile``. Needs no GPU and no torch.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from gem_embeddings.plan import explain_tables
from gem_embeddings.planning.explain import Explanation
from gem_embeddings.planning.spec import PlanningFile, PlanningSpec
from gem_opkit.errors import ConfigError, GemError, refusal

_WHERE = "gem_embeddings.planning"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: words after the command; None for those of the process.

    Returns:
        0, or 1 after a message on stderr.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {_WHERE}", description="Plan tables.")
    parser.add_argument("file", type=Path, help="TOML file with tables and planning")
    parser.add_argument("--gpus", type=int, help="ranks; replaces the number of hosts of the file")
    parser.add_argument("--most-tables", type=int, help="list no more than the N largest tables")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    given = parser.parse_args(arguments)
    if given.most_tables is not None and given.most_tables < 0:
        parser.error(f"--most-tables must be at least 0; got {given.most_tables}")
    try:
        explanation = _explain(given.file, given.gpus)
    except (GemError, ValidationError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    text = json.dumps(figures(explanation)) + "\n" if given.json else ""
    sys.stdout.write(text or explanation.text(given.most_tables))
    return 0


def _explain(file: Path, gpus: int | None) -> Explanation:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    # Broken TOML is a ValueError, and so is a number of thousands of digits.
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            refusal(_WHERE, "file", must="be readable TOML", got=error, fix="give another file")
        ) from error
    described = PlanningFile.model_validate(found)
    tables, planning = described.expanded()
    return explain_tables(
        tables,
        described.lookups,
        optimizer=described.optimizer,
        planning=planning if gpus is None else with_gpus(planning, gpus),
    )


def with_gpus(planning: PlanningSpec, gpus: int) -> PlanningSpec:
    """Return the same planning for another number of GPUs.

    Args:
        planning: with a topology.
        gpus: ranks, whole hosts of the topology, or fewer than one host.

    Returns:
        planning with as many hosts as that takes.

    Raises:
        ConfigError: no topology, or a broken number of hosts.
    """
    topology = planning.topology
    on_host = topology.ranks_per_host if topology else 1
    if topology is None or gpus < 1 or (gpus > on_host and gpus % on_host):
        raise ConfigError(
            refusal(
                _WHERE,
                "--gpus",
                must=f"fill whole hosts of {on_host} of a topology in the file",
                got=f"{gpus} and topology={'given' if topology else 'none'}",
                fix=f"use a multiple of {on_host}, and describe [planning.topology]",
            )
        )
    hosts = max(1, gpus // on_host)
    # Validated anew: more hosts may need links that the file does not describe.
    changed = topology.model_dump() | {"hosts": hosts, "ranks_per_host": min(gpus, on_host)}
    return planning.model_copy(update={"topology": type(topology).model_validate(changed)})


def figures(explanation: Explanation) -> dict[str, object]:
    """Return what a plan costs as plain numbers.

    Args:
        explanation: of the plan.

    Returns:
        JSON-able figures: factors, kinds, memory, balance, milliseconds and bytes by tier.
    """
    plan, step = explanation.plan, explanation.solution.step
    kinds = [line.sharding for line in explanation.lines]
    return {
        "ranks": plan.ranks,
        "table_shard": plan.table_shard,
        "table_replicate": plan.table_replicate,
        "fully_sharded": plan.fully_sharded,
        "tables": len(kinds),
        "kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "held_bytes_most": step.held_bytes[0],
        "held_bytes_mean": round(step.held_bytes[1]),
        "gathered_bytes_most": step.gathered_bytes[0],
        "balance_ms": round(step.balance_ms, 4),
        "balance_bytes": round(step.balance_bytes, 4),
        "step_ms": round(step.ms, 4),
        "exchanges": [
            {
                "name": exchange.name,
                "ms": round(exchange.ms, 4),
                "rank_bytes": round(exchange.rank_bytes),
                "tier_bytes": {tier: round(b) for tier, b in exchange.tier_bytes.items()},
            }
            for exchange in step.exchanges
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
