"""A model with what makes sharding hard: unequal experts, dataclasses between layers, small parts.

Float64, so that a wrong factor or a missing gradient cannot hide in rounding.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from gem_parallel.contract import ParallelPlan
from gem_parallel.dense import parallelise
from gem_parallel.launch import World

WIDTH, TOKENS, STREAM = 6, 7, 5
EXAMPLES = 9
# How many of the nine examples each rank has, step by step: unequal, and none at all.
SHARES = {
    1: [(9,)],
    2: [(5, 4), (9, 0), (1, 8)],
    4: [(3, 2, 2, 2), (3, 0, 4, 2), (0, 0, 9, 0), (1, 6, 1, 1)],
}


@dataclass(frozen=True, slots=True)
class State:
    x_BND: torch.Tensor
    name: str


class Expert(nn.Module):
    """Reads some tokens, gives back two."""

    def __init__(self, tokens):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(2, tokens) / tokens**0.5)
        self.wide = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x_BND):
        return torch.tanh(torch.einsum("mn,bnd->bmd", self.mix, self.wide(x_BND))) * self.gain


def run(experts, parts):
    return sum(expert(part) for expert, part in zip(experts, parts, strict=True))


class Mixture(nn.Module):
    def __init__(self, tokens, count):
        super().__init__()
        self.count = count
        self.experts = nn.ModuleList(
            Expert(len(range(tokens)[place::count])) for place in range(count)
        )
        self.run = run

    def forward(self, x_BND):
        return self.run(
            self.experts, [x_BND[:, place :: self.count] for place in range(self.count)]
        )


class Layer(nn.Module):
    def __init__(self, tokens, count):
        super().__init__()
        self.stream = nn.Linear(STREAM, STREAM)
        self.into = nn.Linear(STREAM, WIDTH)
        self.mixture = Mixture(tokens, count)

    def forward(self, x_BND, states):
        state = states["events"]
        moved_BND = torch.tanh(self.stream(state.x_BND))
        x_BND = x_BND + self.into(moved_BND.mean(1, keepdim=True))
        return self.mixture(x_BND), {"events": replace(state, x_BND=state.x_BND + moved_BND)}


class Model(nn.Module):
    """Two layers; the head reads the last state too, whose gradient comes before the tokens'."""

    def __init__(self, count=4):
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.tokens = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(TOKENS, count), Layer(2 * count, count)])
        self.widen = nn.Parameter(torch.randn(2 * count, 2))
        self.head = nn.Linear(2 * WIDTH + STREAM, 2)
        self.scale, self.scaled = nn.Parameter(torch.ones(())), True

    def forward(self, ids_BN, events_BND):
        x_BND = torch.tanh(self.tokens(self.table(ids_BN)))
        states = {"events": State(events_BND, "events")}
        x_BND, states = self.layers[0](x_BND, states)
        x_BND, states = self.layers[1](torch.einsum("mn,bnd->bmd", self.widen, x_BND), states)
        last = [x_BND.flatten(1), states["events"].x_BND.mean(1)]
        out_BA = self.head(torch.cat(last, dim=1))
        return out_BA * (self.scale if self.scaled else self.scale.detach())


UNITS = ("tokens", "layers.0", "layers.0.mixture", "layers.1", "head")
MIXTURES = ("layers.0.mixture", "layers.1.mixture")


def make_model(seed=0, count=4, dtype=torch.float64):
    torch.manual_seed(seed)
    return Model(count).to(dtype)


def make_batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + step)
    return (
        torch.randint(11, (EXAMPLES, TOKENS), generator=generator),
        torch.randn(EXAMPLES, 3, STREAM, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(EXAMPLES, 2, generator=generator, dtype=torch.float64).to(dtype),
    )


def own_rows(batch, step, world, examples=EXAMPLES):
    """This rank's rows of a batch, on its device."""
    shares = SHARES[world.size][step % len(SHARES[world.size])]
    ends = [examples * sum(shares[:rank]) // EXAMPLES for rank in (world.rank, world.rank + 1)]
    return [part[slice(*ends)].to(world.device) for part in batch]


def loss_of(model, batch, world):
    """This rank's share of the whole batch's mean loss, times the ranks: gradients are averaged."""
    ids_BN, events_BND, y_BA = batch
    error = (model(ids_BN, events_BND) - y_BA).square().sum()
    return error / (2 * EXAMPLES) * world.size


# Parameters with fewer elements are copies: gains, biases and mixes are; linear layers are not, and
# ``widen`` is not, which belongs to no unit.
SMALL = 16


def plan_of(replicate, shard, expert):
    ranks = replicate * shard * expert
    return ParallelPlan(
        replicate=replicate,
        shard=shard,
        expert=expert,
        table_replicate=ranks,
        replicate_below=SMALL,
    )


def plans_of(ranks):
    """Every split of the ranks over the three axes."""
    return [
        plan_of(replicate, shard, ranks // replicate // shard)
        for replicate in (1, 2, 4)
        for shard in (1, 2, 4)
        if ranks % (replicate * shard) == 0
    ]


def name_of(plan):
    return f"{plan.replicate}x{plan.shard}x{plan.expert}"


def count_elements():
    """Elements of each kind of parameter, the table left out."""
    kinds = dict.fromkeys(["cut", "cut, expert", "copied", "copied, expert"], 0)
    for name, p in make_model().named_parameters():
        kind = "copied" if p.numel() < SMALL else "cut"
        if name != "table.weight":
            kinds[kind + ", expert" * ("experts" in name)] += p.numel()
    return kinds


STATISTICS = count_elements()


def spread(world, plan, seed=0, count=4, dtype=torch.float64):
    """The model under a plan, and its table, which nobody merges."""
    model = make_model(seed=seed, count=count, dtype=dtype).to(world.device)
    table = model.table.weight
    dense = parallelise(model, plan, world, units=UNITS, experts=MIXTURES, ignored=[table])
    return dense, table


def optimizer_of(dense, table):
    groups = [{"params": group} for group in dense.foreach_groups(dense.parameters.values())]
    return torch.optim.Adam([*groups, {"params": [table]}], lr=0.02, foreach=True)


def nccl_world(world, store):
    """The same ranks with a GPU each, over NCCL as ``torchrun`` would have them."""
    torch.cuda.set_device(world.rank)
    dist.destroy_process_group()
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=world.rank, world_size=world.size
    )
    return World(world.rank, world.size, torch.device("cuda", world.rank))
