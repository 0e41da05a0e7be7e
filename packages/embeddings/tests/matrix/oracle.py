"""What every engine must compute: whole tables in fp64, one process, every rule written out.

Each sharding group has tables of its own. In a step every rank's loss is the mean over its own
batch, a table's gradient is the mean over the ranks of the group, and the rows that the group has
looked up move by the rule; a sync replaces tables and states by their mean over groups. Groups that
exchange gradients are one group of all ranks.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gem_embeddings.contract import LookupSpec, TableSpec
from gem_embeddings.counters import TableCounts
from gem_embeddings.hashing import hash_to_rows
from gem_jagged.batch import Jagged
from gem_parallel.contract import SPARSE_AXES
from gem_parallel.launch import World

# Widths that four column owners and torchrec's multiples of 4 can share; one table of one row.
SPECS = {
    "item": TableSpec(name="item", embedding_dim=16, num_embeddings=23, feature_names=("liked",)),
    "query": TableSpec(
        name="query",
        embedding_dim=32,
        num_embeddings=14,
        feature_names=("words",),
        pooling="mean",
        id_space="hash",
    ),
    "near": TableSpec(
        name="near",
        embedding_dim=16,
        num_embeddings=6,
        feature_names=("place",),
        out_of_range="clamp",
    ),
    "one": TableSpec(
        name="one",
        embedding_dim=16,
        num_embeddings=1,
        feature_names=("flag",),
        pooling="mean",
        out_of_range="zero",
    ),
}
# A second feature of a pooled table, and one whose vectors stay one an id.
LOOKUPS = [
    LookupSpec(feature_name="seen", table_name="item", pooling="mean"),
    LookupSpec(feature_name="history", table_name="item", pooling="none"),
]
POOLED = {"liked": "sum", "seen": "mean", "words": "mean", "place": "sum", "flag": "mean"}
OWNER = {
    "liked": "item",
    "seen": "item",
    "history": "item",
    "words": "query",
    "place": "near",
    "flag": "one",
}
# Examples of each rank in each step; every rank is without any once.
EXAMPLES = ((3, 0, 5, 2), (0, 4, 1, 3), (2, 2, 0, 6), (1, 3, 2, 0))
LOW, HIGH = {"place": -2, "flag": -1}, {"place": 9, "flag": 2, "words": 2**62}


def batch(step, rank, *, sequences=True):
    """Ids of every feature and weights of one, of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    examples = EXAMPLES[step % len(EXAMPLES)][rank % 4]
    ids = {}
    for feature, table in OWNER.items():
        if feature == "history" and not sequences:
            continue
        lengths = torch.randint(0, 5, (examples,), generator=generator)
        high = HIGH.get(feature, SPECS[table].num_embeddings)
        drawn = torch.randint(LOW.get(feature, 0), high, (int(lengths.sum()),), generator=generator)
        ids[feature] = Jagged.from_lengths(drawn, lengths)
    weights = {"liked": torch.rand(ids["liked"].total_tokens, generator=generator) + 0.5}
    return examples, ids, weights


def batch_loss(examples, vectors):
    """Mean over examples of something that is not linear in the vectors."""
    total = sum((3 * vectors[name]).sin().sum() for name in sorted(vectors))
    return total / max(examples, 1)


class Oracle:
    """The tables of all sharding groups.

    Args:
        initial: table name -> (R, E).
        groups: sharding groups.
        optimizer: the rule.
    """

    def __init__(self, initial, groups, optimizer):
        self.optimizer = optimizer
        self.tables = [{n: w.double().clone() for n, w in initial.items()} for _ in range(groups)]
        self.states = [
            {name: self._nothing(w) for name, w in tables.items()} for tables in self.tables
        ]
        self.steps = 0

    def step(self, batches, *, passes=1):
        """Train on a batch for each rank of each group.

        Args:
            batches: for each group, one ``(examples, ids, weights)`` for each of its ranks, and
                for each pass where gradients of several add up.
            passes: of each rank.

        Returns:
            for each group, for each batch: loss, and gradient of the weights of ids.
        """
        self.steps += 1
        told = []
        for tables, states, of_ranks in zip(self.tables, self.states, batches, strict=True):
            leaves = {name: w.clone().requires_grad_() for name, w in tables.items()}
            seen = {name: set() for name in tables}
            losses, weight_leaves = [], []
            for examples, ids, weights in of_ranks:
                own = {name: w.double().requires_grad_() for name, w in weights.items()}
                vectors = {
                    name: self._look_up(leaves[OWNER[name]], name, ids[name], own.get(name), seen)
                    for name in ids
                }
                losses.append(batch_loss(examples, vectors))
                weight_leaves.append(own["liked"])
            # Each rank's own loss reaches its weights; tables get the mean over the group.
            sum(losses).backward()
            told.append(
                [
                    (
                        float(loss.detach()),
                        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad,
                    )
                    for loss, leaf in zip(losses, weight_leaves, strict=True)
                ]
            )
            for name, leaf in leaves.items():
                rows = sorted(seen[name])
                if rows:
                    grad = leaf.grad[rows] * passes / len(of_ranks)
                    self._move(tables[name], states[name], rows, grad)
        return told

    def sync(self):
        """Replace tables and states by their mean over groups."""
        for name in self.tables[0]:
            mean = torch.stack([tables[name] for tables in self.tables]).mean(0)
            for tables in self.tables:
                tables[name] = mean.clone()
            for key in self.states[0][name]:
                mean = torch.stack([states[name][key] for states in self.states]).mean(0)
                for states in self.states:
                    states[name][key] = mean.clone()

    def _look_up(self, table, feature, ids, weight, seen):
        spec = SPECS[OWNER[feature]]
        out = []
        values = ids.values
        if spec.id_space == "hash":
            values = hash_to_rows(values, spec.num_embeddings, seed=spec.hash_seed)
        places = iter(range(len(values)))
        for length in ids.lengths.tolist():
            rows = []
            for _ in range(length):
                place = next(places)
                row = int(values[place])
                inside = 0 <= row < spec.num_embeddings
                if not inside and spec.out_of_range == "zero":
                    rows.append(torch.zeros(spec.embedding_dim, dtype=torch.float64))
                    continue
                row = min(max(row, 0), spec.num_embeddings - 1)
                seen[spec.name].add(row)
                rows.append(table[row] * (1 if weight is None else weight[place]))
            if feature not in POOLED:
                out += rows
                continue
            total = sum(rows, torch.zeros(spec.embedding_dim, dtype=torch.float64))
            out.append(total / max(length, 1) if POOLED[feature] == "mean" else total)
        # A slice keeps the graph whole where there is nothing.
        return torch.stack(out) if out else table[:0]

    def _nothing(self, table):
        """The states of a table that has not been trained."""
        shapes = {
            "sgd": {},
            "rowwise_adagrad": {"sum": table.shape[:1]},
            "adagrad": {"sum": table.shape},
            "adam": {"exp_avg": table.shape, "exp_avg_sq": table.shape},
        }
        found = shapes[self.optimizer.kind]
        return {key: torch.zeros(shape, dtype=torch.float64) for key, shape in found.items()}

    def _move(self, table, state, rows, grad):
        o = self.optimizer
        if o.kind == "sgd":
            table[rows] -= o.lr * grad
            return
        if o.kind == "adam":
            m, v = state["exp_avg"], state["exp_avg_sq"]
            m[rows] = o.beta1 * m[rows] + (1 - o.beta1) * grad
            v[rows] = o.beta2 * v[rows] + (1 - o.beta2) * grad**2
            mean, square = m[rows] / (1 - o.beta1**self.steps), v[rows] / (1 - o.beta2**self.steps)
            table[rows] -= o.lr * mean / (square.sqrt() + o.eps)
            return
        if o.kind == "adagrad":
            s = state["sum"]
            s[rows] += grad**2
            table[rows] -= o.lr * grad / (s[rows].sqrt() + o.eps)
            return
        s = state["sum"]
        s[rows] += (grad**2).mean(dim=1)
        table[rows] -= o.lr * grad / ((s[rows] / o.moment_scale).sqrt() + o.eps)[:, None]


def counted(batches):
    """Counts of each table over the batches of a rank, id by id."""
    found = {name: TableCounts() for name in SPECS}
    for _, ids, _ in batches:
        rows = {name: set() for name in SPECS}
        for feature, jagged in ids.items():
            spec = SPECS[OWNER[feature]]
            values = jagged.values
            if spec.id_space == "hash":
                values = hash_to_rows(values, spec.num_embeddings, seed=spec.hash_seed)
            outside = 0
            for row in values.tolist():
                inside = 0 <= row < spec.num_embeddings
                outside += not inside
                if inside or spec.out_of_range == "clamp":
                    rows[spec.name].add(min(max(row, 0), spec.num_embeddings - 1))
            found[spec.name] += TableCounts(
                looked_up=len(values),
                out_of_range=outside,
                empty_bags=sum(n == 0 for n in jagged.lengths.tolist()) * (feature in POOLED),
                clipped=outside * (spec.out_of_range == "clamp"),
            )
        for name, different in rows.items():
            found[name] += TableCounts(unique=len(different))
    return found


_meshes = {}


def mesh_of(world, group, replicas):
    """The ranks as (table_shard, table_replicate); made once, as communicators take a while."""
    if world.size == 1:
        return None
    if (group, replicas) not in _meshes:
        shape = (group, replicas)
        kind = world.device.type
        _meshes[shape] = init_device_mesh(kind, shape, mesh_dim_names=SPARSE_AXES)
    return _meshes[group, replicas]


def nccl_world(world, store):
    """The same ranks with a GPU each, over NCCL as ``torchrun`` would have them."""
    torch.cuda.set_device(world.rank)
    dist.destroy_process_group()
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=world.rank, world_size=world.size
    )
    return World(world.rank, world.size, torch.device("cuda", world.rank))


def on(world, given):
    """A batch on the device of a rank."""
    examples, ids, weights = given
    moved = {name: jagged.to(world.device) for name, jagged in ids.items()}
    return examples, moved, {name: weight.to(world.device) for name, weight in weights.items()}
