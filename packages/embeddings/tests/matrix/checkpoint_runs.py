"""Short trainings that can be broken off anywhere and go on under another plan."""

import torch
from oracle import LOOKUPS, OWNER, SPECS, batch_loss, mesh_of

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.engine import build_tables
from gem_embeddings.plan import place_tables
from gem_jagged.batch import Jagged

EXAMPLES = 12  # split evenly over 1, 2, 3 and 4 ranks
SAVED_AT, END = 7, 10


def part(step, index, parts):
    """An equal part of the batch of a step, the same whole batch however it is split."""
    share = EXAMPLES // parts
    ids = {}
    for place, feature in enumerate(OWNER):
        rows = SPECS[OWNER[feature]].num_embeddings
        lists = []
        for example in range(index * share, (index + 1) * share):
            generator = torch.Generator().manual_seed(10_000 * step + 100 * place + example)
            count = int(torch.randint(0, 4, (), generator=generator))
            lists.append(torch.randint(0, rows, (count,), generator=generator))
        ids[feature] = Jagged.from_list(lists)
    return ids


def rule(kind):
    # A large eps, or what gradients are multiplied by would hardly show.
    return OptimizerSpec(kind=kind, lr=0.1, eps=0.05)


def build(world, kind, sharding, replicas=1, *, fully=False, engine="torch", **changes):
    specs = [spec.model_copy(update=changes.get(spec.name, {})) for spec in SPECS.values()]
    optimizer = rule(kind)
    plan = place_tables(
        specs,
        {spec.name: sharding for spec in specs},
        table_shard=world.size // replicas,
        table_replicate=replicas,
        fully_sharded=fully,
        optimizer=optimizer,
    )
    mesh = mesh_of(world, world.size // replicas, replicas)
    return build_tables(specs, LOOKUPS, plan, optimizer, world, engine=engine, seed=5, mesh=mesh)


def train(engine, begin, end):
    """Losses of the whole batches, as this rank's share of each; replicas are fed the same."""
    world, plan = engine.world, engine.plan
    losses = []
    for step in range(begin, end):
        if step == SAVED_AT - 2:
            engine.set_lr(0.03)
        ids = part(step, world.rank // plan.table_replicate, plan.table_shard)
        ids = {name: jagged.to(world.device) for name, jagged in ids.items()}
        loss = batch_loss(EXAMPLES // plan.table_shard, engine(ids))
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def weights(engine):
    return {name: engine.full_weight(name) for name in SPECS}
