"""The ways in which one table can be cut, each with its cost on the ranks that hold a part.

The cost of a part is what its owner does for the whole sharding group in a step: read rows, send
vectors, take gradients, update rows. What every rank does alike whatever the cut (pooling and
merging its own batch) is left out of the comparison and counted once for the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gem_embeddings.contract import ROW_BYTES, Sharding, TableSpec
from gem_embeddings.planning.layout import GroupLayout
from gem_embeddings.planning.links import GroupLinks
from gem_embeddings.planning.spec import PlanningSpec
from gem_embeddings.planning.traffic import TableTraffic
from gem_opkit.errors import UnsupportedError, refusal

ALL_KINDS: tuple[Sharding, ...] = (
    "replicated",
    "table_wise",
    "column_wise",
    "table_row_wise",
    "grid",
    "row_wise",
)
# Parts of a row below 16 elements are shorter than what device memory moves at once.
_LEAST_COLUMNS = 16
# Elements of a row that fbgemm moves at a time.
_TORCHREC_WIDTHS = 4
_VALUE_BYTES = 4
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class PartCost:
    """What one part of a table costs the rank that holds it, in a step.

    Attributes:
        held_bytes: weights and optimizer rows between steps.
        copy_bytes: gathered copy of the weights while rows are read and updated.
        lookup_ms: reading rows and writing what is sent.
        update_ms: reading gradients, reading and writing rows and their state.
        id_bytes: ids that arrive, from all ranks of the group.
        vector_bytes: vectors that leave, to all ranks of the group; gradients come back alike.
        count_bytes: numbers of ids that arrive, one from each rank of the group.
        square_bytes: square sums that leave, where row-wise AdaGrad needs those of other columns.
        exchange_ms: counts, ids, vectors, gradients and square sums on the links.
        ms: all of it; what goes on between the copies of a part is counted with the step.
    """

    held_bytes: int
    copy_bytes: int
    lookup_ms: float
    update_ms: float
    id_bytes: float
    vector_bytes: float
    count_bytes: int
    square_bytes: float
    exchange_ms: float
    ms: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to cut one table.

    Attributes:
        sharding: the kind.
        row_cuts: ranks along the rows.
        column_cuts: ranks along the columns.
        row_parts: of these the ranks that own any rows, the first ones.
        column_parts: of these the ranks that own any columns, the first ones.
        part: cost of the largest part; the others are taken to be like it.
        spread_bytes: ids and gradients that each rank passes on to keep replicated rows equal.
    """

    sharding: Sharding
    row_cuts: int
    column_cuts: int
    row_parts: int
    column_parts: int
    part: PartCost
    spread_bytes: float = 0.0

    @property
    def places(self) -> int:
        """Ranks that the cut is laid over; 0 for a replicated table, which all ranks hold."""
        return 0 if self.sharding == "replicated" else self.row_cuts * self.column_cuts

    @property
    def parts(self) -> int:
        """Ranks that own a part; 0 for a replicated table."""
        return 0 if self.sharding == "replicated" else self.row_parts * self.column_parts

    def holders(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return those ranks that own anything of the table.

        Args:
            ranks: ranks that the cut is laid over, in the order of their parts.

        Returns:
            a ``range`` where ``ranks`` is one and the owners are its first.
        """
        if self.parts in (0, len(ranks)):
            return ranks
        if self.column_cuts == 1 or self.row_cuts == 1:
            return ranks[: self.parts]
        return tuple(
            rank
            for position, rank in enumerate(ranks)
            if position % self.row_cuts < self.row_parts
            and position // self.row_cuts < self.column_parts
        )

    def total_ms(self, table_shard: int) -> float:
        """Return the time of a step that the table takes on all ranks of a group together."""
        return self.part.ms * (self.parts or table_shard)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all tables of one plan share.

    Attributes:
        layout: how shards are stored.
        links: what joins the ranks.
        spec: what the plan is made for.
    """

    layout: GroupLayout
    links: GroupLinks
    spec: PlanningSpec


def candidates(table: TableSpec, traffic: TableTraffic, setting: Setting) -> list[Candidate]:
    """List the ways in which a table can be cut in a group of this size.

    Args:
        table: the table.
        traffic: what a step asks it for.
        setting: the group.

    Returns:
        at least one way, in the order of ``ALL_KINDS``.

    Raises:
        UnsupportedError: ``allowed`` leaves only ways that the engine does not have.
    """
    allowed = setting.spec.allowed.get(table.name, ALL_KINDS)
    kinds: list[Sharding] = [kind for kind in ALL_KINDS if kind in allowed]
    if setting.spec.engine == "torchrec":
        kinds = _torchrec_kinds(table, kinds, traffic, setting)
    found: list[Candidate] = []
    for alone in (False, True):
        # A group too small for any of the kinds gets those that are one with a simpler kind there.
        found = [
            candidate_of(kind, *cut, table, traffic, setting)
            for kind in kinds
            for cut in _cuts(kind, table, setting.links, alone=alone)
        ]
        if found:
            break
    return found


def _torchrec_kinds(
    table: TableSpec, kinds: list[Sharding], traffic: TableTraffic, setting: Setting
) -> list[Sharding]:
    """Leave out what that engine would refuse."""
    missing: dict[Sharding, str] = {}
    if setting.links.table_shard > 1:
        missing["replicated"] = "in a group of several ranks"
    if traffic.unpooled:
        missing["table_row_wise"] = missing["grid"] = "for features without pooling"
    if setting.layout.optimizer.kind == "rowwise_adagrad":
        missing["column_wise"] = missing["grid"] = "under row-wise AdaGrad"
    odd = "for bf16 rows" if table.row_dtype == "bf16" else ""
    if table.embedding_dim % _TORCHREC_WIDTHS:
        odd = f"for rows of {table.embedding_dim}, no multiple of {_TORCHREC_WIDTHS}"
    if odd:
        # Replicated tables are held by the engine "torch", inside that one.
        missing |= {kind: odd for kind in ALL_KINDS if kind not in {"replicated", *missing}}
    runnable: list[Sharding] = [kind for kind in kinds if kind not in missing]
    if not runnable:
        raise UnsupportedError(
            refusal(
                "plan_tables",
                f"allowed[{table.name!r}]",
                must="hold a kind that the engine torchrec has",
                got=", ".join(f"{kind}, which it has not {missing[kind]}" for kind in kinds),
                fix='use engine="torch"' if odd else 'allow row_wise, or use engine="torch"',
            )
        )
    return runnable


def _cuts(
    kind: Sharding, table: TableSpec, links: GroupLinks, *, alone: bool
) -> list[tuple[int, int]]:
    """Return (row_cuts, column_cuts) of a kind; alone, a kind is taken in any case."""
    ranks, host = links.table_shard, links.host_ranks
    if kind in ("replicated", "table_wise"):
        return [(1, 1)]
    if kind == "row_wise":
        return [(ranks, 1)] if ranks > 1 or alone else []
    if kind == "table_row_wise":
        # On one host it is row_wise under another name.
        return [(host, 1)] if 1 < host < ranks or alone else []
    row_cuts, units = (1, ranks) if kind == "column_wise" else (host, ranks // host)
    most = min(units, table.embedding_dim // _LEAST_COLUMNS)
    cuts = [2**power for power in range(1, 13) if 2**power <= most]
    if kind == "grid" and host == 1 and not alone:
        return []
    if not cuts and alone:
        cuts = [min(2, units, table.embedding_dim)]
    return [(row_cuts, cut) for cut in cuts]


def candidate_of(
    kind: Sharding,
    row_cuts: int,
    column_cuts: int,
    table: TableSpec,
    traffic: TableTraffic,
    setting: Setting,
) -> Candidate:
    """Cost one way of cutting a table.

    Args:
        kind: of sharding.
        row_cuts: ranks along the rows.
        column_cuts: ranks along the columns.
        table: the table.
        traffic: what a step asks it for.
        setting: the group.

    Returns:
        the way, with the cost of its largest part.
    """
    if kind == "replicated":
        return _replicated(table, traffic, setting)
    ranks = setting.links.table_shard
    rows = -(-table.num_embeddings // row_cuts)
    columns = -(-table.embedding_dim // column_cuts)
    # Ceiling division leaves the last ranks of a short table without rows.
    row_parts = -(-table.num_embeddings // rows)
    column_parts = -(-table.embedding_dim // columns)
    wire = ROW_BYTES[setting.spec.wire_dtype]
    ids, squares = ranks * traffic.unique / row_parts, 0.0
    if setting.spec.engine == "torch":
        vectors, id_bytes = ids, ids * _ID_BYTES
        if column_parts > 1 and setting.layout.optimizer.kind == "rowwise_adagrad":
            squares = ids * column_parts * _VALUE_BYTES
    else:
        # Each owner of rows returns a sum for every example; the sums are added where they meet.
        each = _ID_BYTES + (_VALUE_BYTES if traffic.weighted else 0)
        id_bytes = ranks * traffic.ids / row_parts * each
        vectors = ranks * (traffic.pooled_vectors + traffic.sequence_ids / row_parts)
    different = traffic.group_unique / row_parts
    vector_bytes = vectors * columns * wire
    count_bytes = ranks * _ID_BYTES
    sent = count_bytes + id_bytes + 2 * vector_bytes + squares
    exchanged = sent * setting.links.ms_per_byte()
    lookup, update = _memory_ms(table, setting, columns, different, id_bytes, vector_bytes)
    return Candidate(
        sharding=kind,
        row_cuts=row_cuts,
        column_cuts=column_cuts,
        row_parts=row_parts,
        column_parts=column_parts,
        part=PartCost(
            held_bytes=setting.layout.held_bytes(table, rows, columns),
            copy_bytes=setting.layout.copy_bytes(table, rows, columns),
            lookup_ms=lookup,
            update_ms=update,
            id_bytes=id_bytes,
            vector_bytes=vector_bytes,
            count_bytes=count_bytes,
            square_bytes=squares,
            exchange_ms=exchanged,
            ms=lookup + update + exchanged + setting.spec.rates.shard_us / 1e3,
        ),
    )


def _memory_ms(
    table: TableSpec,
    setting: Setting,
    columns: int,
    different: float,
    id_bytes: float,
    vector_bytes: float,
) -> tuple[float, float]:
    """Time of lookup and of update in device memory: each different row moved once each way."""
    rates = setting.spec.rates
    row_bytes = different * columns * ROW_BYTES[table.row_dtype]
    state_bytes = setting.layout.optimizer.shard_state_bytes(1, columns) * different
    moved = (row_bytes + id_bytes + vector_bytes, 2 * row_bytes + 2 * state_bytes + vector_bytes)
    fractions = (rates.lookup_frac, rates.update_frac)
    lookup, update = (
        each / (rates.memory_gbytes_per_s * 1e6 * fraction)
        for each, fraction in zip(moved, fractions, strict=True)
    )
    return lookup, update


def _replicated(table: TableSpec, traffic: TableTraffic, setting: Setting) -> Candidate:
    """Every rank reads its own rows, hears the gradients of all ranks, and moves all rows hit."""
    links, rates, layout = setting.links, setting.spec.rates, setting.layout
    rows, columns = table.num_embeddings, table.embedding_dim
    read = traffic.unique * columns * ROW_BYTES[table.row_dtype]
    each = _ID_BYTES + columns * ROW_BYTES[setting.spec.wire_dtype]
    heard = links.table_shard * traffic.unique * each
    lookup, _ = _memory_ms(table, setting, columns, traffic.unique, 0.0, read)
    _, update = _memory_ms(table, setting, columns, traffic.group_unique, 0.0, heard)
    # In a ring every rank passes on what all others but its neighbour have sent.
    spread = heard - traffic.unique * each
    tier = links.spread_tier
    count_bytes = links.table_shard * _ID_BYTES
    exchanged = count_bytes * links.ms_per_byte()
    exchanged += 0.0 if tier is None else spread / (tier.gbytes_per_s * 1e6)
    return Candidate(
        sharding="replicated",
        row_cuts=1,
        column_cuts=1,
        row_parts=1,
        column_parts=1,
        part=PartCost(
            held_bytes=layout.held_bytes(table, rows, columns),
            copy_bytes=layout.copy_bytes(table, rows, columns),
            lookup_ms=lookup,
            update_ms=update,
            id_bytes=0.0,
            vector_bytes=0.0,
            count_bytes=count_bytes,
            square_bytes=0.0,
            exchange_ms=exchanged,
            ms=lookup + update + exchanged + rates.shard_us / 1e3,
        ),
        spread_bytes=spread,
    )
