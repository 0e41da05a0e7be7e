"""Time and bytes of a whole step: exchanges in a group, collectives between groups, memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gem_embeddings.contract import ROW_BYTES, TableSpec
from gem_embeddings.planning.balance import RankLoads
from gem_embeddings.planning.candidates import Candidate, PartCost, Setting
from gem_embeddings.planning.traffic import TableTraffic

_VALUE_BYTES = 4
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective of a step.

    Attributes:
        name: what travels.
        rank_bytes: bytes that a rank sends, its own part included, mean over ranks.
        tier_bytes: tier -> bytes that a rank sends over it, mean over ranks.
        ms: time on the most loaded rank.
    """

    name: str
    rank_bytes: float
    tier_bytes: Mapping[str, float]
    ms: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """What tables cost in a step.

    Attributes:
        exchanges: every collective.
        owner_ms: reading and updating rows for others, of the most loaded rank.
        batch_ms: pooling and merging the rank's own batch, alike on every rank.
        ms: all of it, on the most loaded rank, nothing overlapped.
        held_bytes: weights and optimizer rows between steps: largest and mean over ranks.
        gathered_bytes: the same with the gathered copies.
        balance_ms: largest over mean time of a rank.
        balance_bytes: largest over mean bytes of a rank.
    """

    exchanges: tuple[Exchange, ...]
    owner_ms: float
    batch_ms: float
    ms: float
    held_bytes: tuple[int, float]
    gathered_bytes: tuple[int, float]
    balance_ms: float
    balance_bytes: float


def step_cost(
    tables: Mapping[str, TableSpec],
    traffic: Mapping[str, TableTraffic],
    chosen: Mapping[str, Candidate],
    loads: RankLoads,
    setting: Setting,
) -> StepCost:
    """Add up a step.

    Args:
        tables: table name -> table.
        traffic: table name -> what a step asks it for.
        chosen: table name -> how it is cut.
        loads: what each rank has to do.
        setting: the group.

    Returns:
        time, bytes and memory.
    """
    names = sorted(chosen)
    ranks = setting.links.table_shard
    parts = {name: chosen[name].part for name in names}
    overhead = setting.spec.rates.shard_us / 1e3
    holders = {name: chosen[name].holders(loads.ranks[name]) for name in names}

    def per_rank(amount: Callable[[PartCost], float], first: float = 0.0) -> list[float]:
        return _per_rank({name: amount(parts[name]) for name in names}, holders, ranks, first)

    # Each rank also tells each other one whether it refuses its batch.
    counts = per_rank(lambda part: part.count_bytes, 8.0 * ranks)
    ids = per_rank(lambda part: part.id_bytes)
    vectors = per_rank(lambda part: part.vector_bytes)
    squares = per_rank(lambda part: part.square_bytes)
    owner = per_rank(lambda part: part.lookup_ms + part.update_ms + overhead)
    exchanges = [
        each
        for each in (
            _all_to_all("counts", counts, setting),
            _all_to_all("ids", ids, setting),
            _all_to_all("vectors", vectors, setting),
            _all_to_all("gradients", vectors, setting),
            _all_to_all("square sums", squares, setting),
            *_replicated(names, chosen, setting),
            *_between_groups(names, tables, chosen, holders, setting),
            *_gradients_of_groups(names, tables, traffic, chosen, holders, setting),
        )
        if each.rank_bytes
    ]
    batch_ms = _batch_ms(names, tables, traffic, setting)
    owner_ms = max(owner)
    gathered = [
        held + copies for held, copies in zip(loads.held_bytes, loads.copy_bytes, strict=True)
    ]
    return StepCost(
        exchanges=tuple(exchanges),
        owner_ms=owner_ms,
        batch_ms=batch_ms,
        ms=owner_ms + batch_ms + sum(each.ms for each in exchanges),
        held_bytes=(max(loads.held_bytes), sum(loads.held_bytes) / ranks),
        gathered_bytes=(max(gathered), sum(gathered) / ranks),
        balance_ms=_balance(loads.ms),
        balance_bytes=_balance(loads.held_bytes),
    )


def _per_rank(
    amounts: Mapping[str, float],
    holders: Mapping[str, Sequence[int]],
    ranks: int,
    first: float = 0.0,
) -> list[float]:
    """Add up what each rank has of every table's parts, given the amount of one part."""
    # Most tables of a large plan lie on every rank, or on all ranks up to some one: for these only
    # the end is noted.
    ends = [0.0] * (ranks + 1)
    summed = [first] * ranks
    for name, amount in amounts.items():
        held = holders[name]
        if isinstance(held, range) and held.start == 0:
            ends[held.stop] += amount
        else:
            for rank in held:
                summed[rank] += amount
    running = 0.0
    for rank in range(ranks - 1, -1, -1):
        running += ends[rank + 1]
        summed[rank] += running
    return summed


def _balance(per_rank: list[float] | list[int]) -> float:
    whole = sum(per_rank)
    return max(per_rank) * len(per_rank) / whole if whole else 1.0


def _all_to_all(name: str, per_rank: list[float], setting: Setting) -> Exchange:
    links = setting.links
    mean = sum(per_rank) / len(per_rank)
    return Exchange(
        name=name,
        rank_bytes=mean,
        tier_bytes={tier: mean * share for tier, share in links.shares.items() if share},
        ms=max(per_rank) * links.ms_per_byte() + links.latency_ms(setting.spec.rates.message_us),
    )


def _replicated(
    names: list[str], chosen: Mapping[str, Candidate], setting: Setting
) -> list[Exchange]:
    tier = setting.links.spread_tier
    reduced = sum(chosen[name].spread_bytes for name in names)
    if tier is None or not reduced:
        return []
    ms = sum(chosen[name].part.exchange_ms for name in names if chosen[name].spread_bytes)
    return [Exchange("ids and gradients of replicated tables", reduced, {tier.name: reduced}, ms)]


def _between_groups(
    names: list[str],
    tables: Mapping[str, TableSpec],
    chosen: Mapping[str, Candidate],
    holders: Mapping[str, Sequence[int]],
    setting: Setting,
) -> list[Exchange]:
    """Gathers and scatters of weights between the copies of a shard, or their plain average."""
    tier, layout = setting.links.replica_tier, setting.layout
    if tier is None:
        return []
    weight_bytes, state_bytes = {}, {}
    for name in names:
        table, way = tables[name], chosen[name]
        rows = -(-table.num_embeddings // way.row_cuts)
        columns = -(-table.embedding_dim // way.column_cuts)
        weight_bytes[name] = ROW_BYTES[table.row_dtype] * rows * columns
        state_bytes[name] = layout.optimizer.shard_state_bytes(rows, columns)
    weights = _per_rank(weight_bytes, holders, layout.table_shard)
    state = _per_rank(state_bytes, holders, layout.table_shard)
    copies = layout.table_replicate
    moved = (copies - 1) / copies

    def collective(name: str, whole: list[float], passes: float) -> Exchange:
        mean = passes * moved * sum(whole) / len(whole)
        most = passes * moved * max(whole)
        return Exchange(name, mean, {tier.name: mean}, most / (tier.gbytes_per_s * 1e6))

    both = [w + s for w, s in zip(weights, state, strict=True)]
    alike = setting.spec.replicas == "gradients"
    if layout.fully_sharded:
        gathers = [
            collective("gather weights to read", weights, 1),
            collective("gather weights and optimizer rows to update", both, 1),
        ]
        return gathers if alike else [*gathers, collective("scatter their mean", both, 1)]
    if alike:
        return []
    every = setting.spec.sync_every
    return [collective("average weights and optimizer rows", both, 2 / every)]


def _gradients_of_groups(
    names: list[str],
    tables: Mapping[str, TableSpec],
    traffic: Mapping[str, TableTraffic],
    chosen: Mapping[str, Candidate],
    holders: Mapping[str, Sequence[int]],
    setting: Setting,
) -> list[Exchange]:
    """Different rows of a group's batches, with their gradients, to the other copies of a shard."""
    tier, layout = setting.links.replica_tier, setting.layout
    if tier is None or setting.spec.replicas != "gradients":
        return []
    wire = ROW_BYTES[setting.spec.wire_dtype]
    own_bytes = {}
    for name in names:
        way, columns = chosen[name], -(-tables[name].embedding_dim // chosen[name].column_cuts)
        rows = traffic[name].group_unique / way.row_parts
        own_bytes[name] = _ID_BYTES + rows * (_ID_BYTES + columns * wire)
    own = _per_rank(own_bytes, holders, layout.table_shard)
    # In a ring each passes on what all but one have.
    passes = layout.table_replicate - 1
    mean = passes * sum(own) / len(own)
    ms = passes * max(own) / (tier.gbytes_per_s * 1e6)
    return [Exchange("gradients between groups", mean, {tier.name: mean}, ms)]


def _batch_ms(
    names: list[str],
    tables: Mapping[str, TableSpec],
    traffic: Mapping[str, TableTraffic],
    setting: Setting,
) -> float:
    """Time of spreading vectors over the batch and merging its gradients, alike on all ranks."""
    moved = 0.0
    for name in names:
        asked, columns = traffic[name], tables[name].embedding_dim
        vectors = asked.unique + asked.pooled_vectors + asked.sequence_ids
        moved += 2 * vectors * columns * _VALUE_BYTES
    rates = setting.spec.rates
    return moved / (rates.memory_gbytes_per_s * 1e6 * rates.lookup_frac)
