"""A plan as one table of text: what lies where, what it costs, and why it was cut like that."""

from collections.abc import Sequence
from dataclasses import dataclass

from gem_embeddings.contract import TablePlan, TableSpec
from gem_embeddings.planning.candidates import Candidate
from gem_embeddings.planning.planner import Solution

_GIB = 1 << 30
_HEADINGS = (
    *("table", "rows x width", "cut", "ranks", "held a rank", "lookup ms", "exchanged a rank"),
    "why this cut",
)
_UNITS = ((1 << 40, "TiB"), (_GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class TableLine:
    """One table of a plan.

    Attributes:
        table_name: its name.
        rows: rows.
        columns: elements of a row.
        sharding: how it is cut.
        ranks: ranks of a group that hold a part of it.
        rank_bytes: weights and optimizer rows of its largest part, between steps.
        lookup_ms: time in which the owner of the largest part reads it for the group, a step.
        part_ms: all that this owner does for the table, a step.
        tier_bytes: tier -> bytes of ids, vectors and gradients that a rank sends for it, mean over
            the group.
        reason: why this cut and not the next best one.
    """

    table_name: str
    rows: int
    columns: int
    sharding: str
    ranks: int
    rank_bytes: int
    lookup_ms: float
    part_ms: float
    tier_bytes: dict[str, float]
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan, its costs and its reasons; ``str`` is the table that people read.

    Attributes:
        plan: the plan.
        lines: one for each table, in the order of the placements.
        solution: everything that was computed.
    """

    plan: TablePlan
    lines: tuple[TableLine, ...]
    solution: Solution

    def __str__(self) -> str:
        """Write the whole table."""
        return self.text()

    def text(self, most_tables: int | None = None) -> str:
        """Write the table of tables, and under it what the plan costs as a whole.

        Args:
            most_tables: how many tables to list, those with the most rows first; None for all, in
                the order of the plan.

        Returns:
            lines of text, ending in a newline.
        """
        shown = list(self.lines)
        if most_tables is not None and len(shown) > most_tables:
            shown.sort(key=lambda line: (-line.rows * line.columns, line.table_name))
            shown = shown[:most_tables]
        cells = [_HEADINGS, *(_cells(line) for line in shown)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADINGS))]
        text = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
        text.insert(1, "  ".join("-" * width for width in widths))
        if len(shown) < len(self.lines):
            text.append(f"... and {len(self.lines) - len(shown)} smaller tables")
        return "\n".join(line.rstrip() for line in [*text, "", *self._summary()]) + "\n"

    def _summary(self) -> list[str]:
        plan, step, limits = self.plan, self.solution.step, self.solution.limits
        held, gathered = step.held_bytes, step.gathered_bytes
        kinds = [line.sharding for line in self.lines]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(sorted(kinds)))
        lines = [
            f"ranks       {plan.ranks} = {plan.table_shard} (table_shard) x "
            f"{plan.table_replicate} (table_replicate)"
            + (", fully sharded" if plan.fully_sharded else ""),
            f"tables      {len(self.lines)}: {counts}",
            f"held        {_bytes(held[0])} most, {_bytes(held[1])} mean a rank, between steps"
            + _limit(limits.held_bytes),
            f"gathered    {_bytes(gathered[0])} most, {_bytes(gathered[1])} mean a rank, while "
            "rows are read and updated" + _limit(limits.gathered_bytes),
            f"balance     time {step.balance_ms:.3f}, bytes {step.balance_bytes:.3f} (most / mean "
            "over the ranks of a group)",
            f"step        {step.ms:.3f} ms, nothing overlapped: rows for others "
            f"{step.owner_ms:.3f}, own batch {step.batch_ms:.3f}, and",
        ]
        for exchange in step.exchanges:
            tiers = ", ".join(f"{_bytes(b)} over {tier}" for tier, b in exchange.tier_bytes.items())
            lines.append(
                f"            {exchange.ms:.3f} ms {exchange.name}: {_bytes(exchange.rank_bytes)} "
                "a rank" + (f", of it {tiers}" if tiers else "")
            )
        return lines


def _limit(limit_bytes: float) -> str:
    return "" if limit_bytes == float("inf") else f"; {_bytes(limit_bytes)} allowed"


def _cells(line: TableLine) -> tuple[str, ...]:
    tiers = ", ".join(f"{_bytes(amount)} {tier}" for tier, amount in line.tier_bytes.items())
    return (
        line.table_name,
        f"{line.rows:,} x {line.columns}",
        line.sharding,
        str(line.ranks),
        _bytes(line.rank_bytes),
        f"{line.lookup_ms:.4f}",
        tiers or "-",
        line.reason,
    )


def _bytes(amount: float) -> str:
    for unit, name in _UNITS:
        if amount >= unit:
            return f"{amount / unit:.2f} {name}"
    return f"{amount:.0f} B"


def explain(
    solution: Solution, tables: Sequence[TableSpec], plan: TablePlan | None = None
) -> Explanation:
    """Say what a plan costs and why each table was cut as it is.

    Args:
        solution: what the planner found, or what a given plan costs.
        tables: the tables, in the order of the placements.
        plan: the given plan; None for that of the solution.

    Returns:
        the explanation.
    """
    setting = solution.setting
    ranks = setting.links.table_shard
    plan = solution.plan(tables) if plan is None else plan
    placements = {placement.table_name: placement for placement in plan.placements}
    lines = []
    for table in tables:
        placement = placements[table.name]
        way = solution.chosen[table.name]
        part = way.part
        sent = part.count_bytes + part.id_bytes + 2 * part.vector_bytes + part.square_bytes
        sent *= way.parts / ranks
        tiers = {tier: sent * share for tier, share in setting.links.shares.items() if share}
        if way.spread_bytes and setting.links.spread_tier is not None:
            tiers = {setting.links.spread_tier.name: way.spread_bytes}
        lines.append(
            TableLine(
                table_name=table.name,
                rows=table.num_embeddings,
                columns=table.embedding_dim,
                sharding=way.sharding,
                ranks=way.parts or ranks,
                rank_bytes=placement.rank_bytes,
                lookup_ms=way.part.lookup_ms,
                part_ms=way.part.ms,
                tier_bytes=tiers,
                reason=_reason(way, solution.options[table.name], solution),
            )
        )
    return Explanation(plan=plan, lines=tuple(lines), solution=solution)


def _reason(way: Candidate, ways: Sequence[Candidate], solution: Solution) -> str:
    """Compare with the next best way: the last cheaper one was too much for a rank."""
    ranks, limits = solution.setting.links.table_shard, solution.limits
    if not ways:
        return "given"
    others = [other for other in ways if other is not way]
    if not others:
        return "the only cut allowed"
    cheaper = [other for other in others if other.total_ms(ranks) < way.total_ms(ranks)]
    if not cheaper:
        other = min(others, key=lambda o: o.total_ms(ranks))
        more = other.total_ms(ranks) - way.total_ms(ranks)
        return f"least time; {_name(other)} adds {more:.4f} ms, all ranks together"
    other = max(cheaper, key=lambda o: o.total_ms(ranks))
    held, gathered = other.part.held_bytes, other.part.held_bytes + other.part.copy_bytes
    means = sum(solution.loads.ms) / ranks, sum(solution.loads.held_bytes) / ranks
    if held > limits.held_bytes:
        return f"{_name(other)} would hold {_bytes(held)} on a rank"
    if gathered > limits.gathered_bytes:
        return f"{_name(other)} would gather {_bytes(gathered)} on a rank"
    if other.part.ms > solution.part_ms:
        return f"{_name(other)} would take {other.part.ms:.4f} ms of a rank; mean {means[0]:.4f}"
    if held > solution.part_bytes:
        return f"{_name(other)} would hold {_bytes(held)} on a rank; mean {_bytes(means[1])}"
    return f"{_name(other)} found no rank with {_bytes(held)} left"


def _name(way: Candidate) -> str:
    if way.sharding == "column_wise":
        return f"column_wise over {way.column_cuts}"
    if way.sharding == "grid":
        return f"grid over {way.column_cuts} hosts"
    return way.sharding
