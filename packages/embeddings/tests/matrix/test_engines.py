"""Both engines, every sharding, 1, 2 and 4 ranks: the numbers of unsharded training.

Each world of ranks is started once and runs all its cases. What an engine cannot do stands in
``REFUSED`` and must be refused by name.
"""

import re
import tempfile
import traceback
from dataclasses import astuple, dataclass, replace

import pytest
import torch
from oracle import (
    LOOKUPS,
    SPECS,
    Oracle,
    batch,
    batch_loss,
    counted,
    mesh_of,
    nccl_world,
    on,
)

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.engine import build_tables
from gem_embeddings.initial import fill_initial
from gem_embeddings.optimizer import table_optimizer
from gem_embeddings.plan import place_tables
from gem_embeddings.tables import EmbeddingTables
from gem_opkit.errors import UnsupportedError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

STEPS = 4
SYNCS = (1, 3)
SEED = 11
# Large, or AdaGrad and Adam would move rows alike whatever gradients were multiplied by.
EPS = 0.05
# Rounding of fp32 against fp64, over some thousand additions.
FP32 = 2e-5


@dataclass(frozen=True)
class Case:
    sharding: str
    group: int = 1
    replicas: int = 1
    fully: bool = False
    optimizer: str = "rowwise_adagrad"
    rows: str = "fp32"
    wire: str = "fp32"
    scale: float = 1.0
    engine: str = "torch"
    sequences: bool = True
    device: str = "cpu"
    # Sharding groups exchange gradients.
    exact: bool = False
    # Backward passes whose gradients are held for one update.
    passes: int = 1

    def __str__(self):
        parts = [f"{self.group}x{self.replicas}", self.sharding, self.optimizer, self.engine]
        parts += ["fully"] * self.fully + [f"{self.rows}-rows"] * (self.rows != "fp32")
        parts += [f"{self.wire}-wire"] * (self.wire != "fp32") + ["scaled"] * (self.scale != 1)
        parts += ["pooled"] * (not self.sequences) + ["cuda"] * (self.device == "cuda")
        parts += ["exact"] * self.exact + [f"held-{self.passes}"] * (self.passes > 1)
        return "-".join(parts)

    @property
    def ranks(self):
        return self.group * self.replicas

    def optimizer_spec(self):
        return OptimizerSpec(kind=self.optimizer, lr=0.1, eps=EPS, moment_scale=self.scale)


KINDS = ("rowwise_adagrad", "adagrad", "adam", "sgd")
SHARDINGS = ("replicated", "table_wise", "row_wise", "column_wise", "table_row_wise", "grid")
CASES = [
    *(Case("row_wise", optimizer=kind) for kind in KINDS),
    Case("table_wise", rows="bf16"),
    *(Case(sharding, 2) for sharding in SHARDINGS),
    *(Case("row_wise", 2, optimizer=kind) for kind in ("adagrad", "adam", "sgd")),
    *(Case("row_wise", 1, 2, fully) for fully in (False, True)),
    *(Case("column_wise", 2, rows=dtype, wire=dtype) for dtype in ("fp16", "bf16")),
    *(Case(sharding, 4) for sharding in SHARDINGS),
    *(Case(sharding, 2, 2) for sharding in SHARDINGS),
    *(Case(sharding, 2, 2, fully=True) for sharding in SHARDINGS[1:]),
    *(Case("grid", 4, optimizer=kind) for kind in ("adagrad", "adam", "sgd")),
    *(Case("column_wise", 2, 2, fully=True, optimizer=kind) for kind in ("adagrad", "adam")),
    Case("row_wise", 2, 2, scale=2.0),
    Case("row_wise", 2, 2, fully=True, scale=2.0),
    Case("row_wise", 2, 2, fully=True, rows="bf16", wire="bf16"),
    Case("table_wise", 4, wire="fp16"),
    *(Case("row_wise", 1, 2, exact=True, optimizer=k) for k in KINDS),
    Case("replicated", 1, 2, exact=True),
    Case("row_wise", 1, 2, fully=True, exact=True),
    *(Case(sharding, 2, 2, exact=True) for sharding in SHARDINGS),
    *(Case(sharding, 2, 2, fully=True, exact=True) for sharding in SHARDINGS[1:]),
    *(Case("grid", 2, 2, exact=True, optimizer=kind) for kind in KINDS[1:]),
    *(Case("row_wise", 2, 2, fully=True, exact=True, optimizer=kind) for kind in KINDS[1:]),
    Case("column_wise", 2, 2, exact=True, rows="bf16", wire="bf16"),
    *(Case("row_wise", passes=3, optimizer=kind) for kind in KINDS),
    *(Case(sharding, 2, passes=3) for sharding in ("replicated", "row_wise", "column_wise")),
    *(Case("table_wise", 2, passes=3, optimizer=kind) for kind in KINDS[1:]),
    Case("row_wise", 1, 2, fully=True, passes=3),
    Case("column_wise", 2, 2, fully=True, passes=3),
    *(Case(sharding, 2, 2, fully=True, exact=True, passes=3) for sharding in ("grid", "row_wise")),
    Case("replicated", 2, 2, exact=True, passes=3, optimizer="adam"),
]
GPU = [
    *(Case("row_wise", optimizer=k, device="cuda") for k in ("rowwise_adagrad", "adagrad", "adam")),
    Case("replicated", optimizer="sgd", device="cuda"),
    *(Case("table_wise", rows=dtype, device="cuda") for dtype in ("fp16", "bf16")),
    Case("row_wise", passes=3, device="cuda"),
]
GPU2 = [
    replace(case, device="cuda")
    for case in (
        Case("row_wise", 2),
        Case("row_wise", 1, 2, fully=True),
        Case("row_wise", 1, 2),
        Case("column_wise", 2),
        Case("table_wise", 2),
        Case("row_wise", 1, 2, fully=True, optimizer="adam"),
        Case("grid", 2, optimizer="adagrad"),
        Case("replicated", 2),
        Case("column_wise", 2, rows="bf16", wire="bf16"),
        Case("row_wise", 1, 2, fully=True, rows="bf16"),
        *(Case("row_wise", 1, 2, fully=f, exact=True, passes=p) for f, p in ((0, 1), (1, 3))),
        Case("column_wise", 2, passes=3),
    )
]
TORCHREC = [replace(case, engine="torchrec") for case in CASES] + [
    Case(sharding, 4, optimizer="adagrad", engine="torchrec", sequences=sequences)
    for sharding, sequences in (("column_wise", True), ("table_row_wise", False), ("grid", False))
]


def refusal_of(case):
    """What torchrec says of a case that it cannot do; None where an engine has to train it."""
    if case.engine == "torch":
        return None
    if case.passes > 1:
        return 'update must be "backward", where fbgemm moves rows, with engine torchrec; got'
    if case.exact:
        return 'replicas must be "weights" between sharding groups with engine torchrec; got'
    if case.optimizer == "adam":
        return "optimizer must be one of rowwise_adagrad, adagrad, sgd with engine torchrec; got"
    if case.fully and case.replicas > 1:
        return "plan.fully_sharded must be False.* with engine torchrec; got True"
    if case.wire == "bf16":
        return "wire_dtype must be fp32 or fp16 on a CPU.* with engine torchrec; got bf16"
    if case.rows == "bf16":
        return r"row_dtype of table 'item' \(.*\) must be fp32 or fp16 with engine torchrec"
    cuts_columns = case.sharding == "column_wise" or (case.sharding == "grid" and case.group == 4)
    if cuts_columns and case.group > 1 and case.optimizer == "rowwise_adagrad":
        return r"optimizer of table 'item' \(.*\) must be adagrad or sgd where columns are cut"
    if case.sharding in ("table_row_wise", "grid") and case.sequences:
        return r"features of table 'item' \(.*\) must all be pooled with engine torchrec"
    return None


def specs_of(case):
    return [spec.model_copy(update={"row_dtype": case.rows}) for spec in SPECS.values()]


def build(case, world):
    specs, optimizer = specs_of(case), case.optimizer_spec()
    plan = place_tables(
        specs,
        dict.fromkeys(SPECS, case.sharding),
        table_shard=case.group,
        table_replicate=case.replicas,
        fully_sharded=case.fully,
        host_ranks=2 if case.group == 4 else None,
        optimizer=optimizer,
    )
    return build_tables(
        specs,
        [lookup for lookup in LOOKUPS if lookup.pooling != "none" or case.sequences],
        plan,
        optimizer,
        world,
        engine=case.engine,
        wire_dtype=case.wire,
        seed=SEED,
        mesh=mesh_of(world, case.group, case.replicas),
        update="step" if case.passes > 1 else "backward",
        replicas="gradients" if case.exact else "weights",
    )


def weights_of(engine):
    return {name: engine.full_weight(name).cpu() for name in SPECS}


def train(world, case):
    """What one rank sees of the training of a case."""
    engine = build(case, world)
    found = {"initial": weights_of(engine), "passes": []}
    for turn in range(STEPS * case.passes):
        given = batch(turn, world.rank, sequences=case.sequences)
        examples, ids, weights = on(world, given)
        if case.sequences:  # torchrec has no gradient of weights in tables that it pools itself
            weights["liked"].requires_grad_()
        loss = batch_loss(examples, engine(ids, weights))
        loss.backward()
        grad = weights["liked"].grad
        assert grad is not None or weights["liked"].numel() == 0 or not case.sequences
        told = float(loss.detach()), None if grad is None else grad.cpu()
        found["passes"].append(told)
        step, part = divmod(turn, case.passes)
        if part < case.passes - 1:
            continue
        if case.passes > 1:
            engine.apply()
        if step in SYNCS:
            engine.sync()
    found["final"] = weights_of(engine)
    found["counts"] = engine.counters()
    return found


def train_all(world, cases):
    found = []
    for fields in cases:
        case = Case(*fields)
        try:
            found.append(train(world, case))
        except UnsupportedError as refused:
            found.append(refused)
        except Exception:  # noqa: BLE001 - told in the parent, for this case alone
            found.append(traceback.format_exc())
    return found


def train_all_over_nccl(world, store, cases):
    return train_all(nccl_world(world, store), cases)


_worlds = {}


def ranks_of(case):
    """What every rank saw of a case; all cases of its engine and its number of ranks run once."""
    key = case.engine, case.device, case.ranks
    if key not in _worlds:
        cases = [c for c in CASES + GPU + GPU2 + TORCHREC if (c.engine, c.device, c.ranks) == key]
        # torchrec makes a process group of one rank, which would stay in the process of the tests.
        fields = [astuple(c) for c in cases]
        if case.ranks == 1 and case.engine == "torch":
            by_rank = [train_all(World(device=torch.device(case.device)), fields)]
        elif case.device == "cuda":
            with tempfile.TemporaryDirectory() as folder:
                given = f"{folder}/store", fields
                by_rank = run_ranks(train_all_over_nccl, case.ranks, *given, timeout_s=300)
        else:
            by_rank = run_ranks(train_all, case.ranks, fields, timeout_s=300)
        _worlds[key] = dict(zip(cases, zip(*by_rank, strict=True), strict=True))
    found = _worlds[key][case]
    for told in found:
        if isinstance(told, str):
            pytest.fail(told)
    return found


def trained(case):
    """As ``ranks_of``, of a case that no rank may refuse."""
    found = ranks_of(case)
    for told in found:
        if isinstance(told, UnsupportedError):
            raise told
    return found


def expected(case, initial):
    """Losses and gradients of weights by pass and world rank, and the tables at the end."""
    groups = 1 if case.exact else case.replicas
    oracle = Oracle(initial, groups, case.optimizer_spec())
    members = [range(m, case.ranks, groups) for m in range(groups)]
    told = []
    for step in range(STEPS):
        turns = range(step * case.passes, (step + 1) * case.passes)
        given = [
            [batch(turn, rank, sequences=case.sequences) for turn in turns for rank in ranks]
            for ranks in members
        ]
        seen = [iter(of_group) for of_group in oracle.step(given, passes=case.passes)]
        for _ in turns:
            of_ranks = {
                rank: next(of_group)
                for ranks, of_group in zip(members, seen, strict=True)
                for rank in ranks
            }
            told.append(of_ranks)
        if case.fully or step in SYNCS:
            oracle.sync()
    return told, oracle.tables[0]


def marked(case):
    marks = [pytest.mark.torchrec] * (case.engine == "torchrec")
    marks += [pytest.mark.gpu] * (case in GPU) + [pytest.mark.gpu2] * (case in GPU2)
    return pytest.param(case, id=str(case), marks=marks)


ALL = [marked(case) for case in CASES + GPU + GPU2 + TORCHREC]
TRAINED = [marked(case) for case in CASES + GPU + GPU2 + TORCHREC if refusal_of(case) is None]


@pytest.mark.parametrize("case", ALL)
def test_an_engine_trains_as_whole_tables_do_or_names_what_it_cannot(case):
    pattern = refusal_of(case)
    if pattern is None:
        check(case)
        return
    for told in ranks_of(case):
        assert isinstance(told, UnsupportedError)
        assert re.search(pattern, str(told)), told
        assert str(told).endswith('use engine="torch"')


def check(case):
    found = trained(case)
    told, tables = expected(case, {n: w.float() for n, w in found[0]["initial"].items()})
    # One unit in the last place of a row or of a vector on its way, for each time that it is
    # rounded; weights and vectors are below 2.
    step_of = {"fp32": 0.0, "fp16": 2.0**-10, "bf16": 2.0**-7}
    low = STEPS * (step_of[case.rows] + step_of[case.wire])
    for rank, seen in enumerate(found):
        for turn, (loss, grad) in enumerate(seen["passes"]):
            right, right_grad = told[turn][rank]
            # A loss adds up the sines of at most some hundred numbers a rank, each moved by 3 x.
            assert loss == pytest.approx(right, rel=FP32, abs=FP32 + 300 * low), (turn, rank)
            if grad is not None:
                torch.testing.assert_close(
                    grad, right_grad.float(), rtol=FP32, atol=FP32 + 60 * low
                )
        for name, weight in seen["final"].items():
            assert (weight.double() - tables[name]).abs().max() <= FP32 + low, (name, rank)
            # Without a mean of rows: groups that exchange gradients are equal by themselves.
            assert not case.exact or torch.equal(weight, found[0]["final"][name]), (name, rank)


@pytest.mark.parametrize("case", TRAINED)
def test_every_plan_starts_with_the_same_bits(case):
    found = trained(case)
    for spec in specs_of(case):
        whole = torch.empty(spec.num_embeddings, spec.embedding_dim)
        fill_initial(whole, spec, seed=SEED)
        for seen in found:
            weight = seen["initial"][spec.name]
            assert torch.equal(weight, whole.to(weight.dtype))


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adagrad", "adam", "sgd"])
def test_whole_tables_agree_with_the_oracle(kind):
    torch.manual_seed(3)
    optimizer = OptimizerSpec(kind=kind, lr=0.1, eps=EPS)
    tables = EmbeddingTables(list(SPECS.values()), LOOKUPS)
    rule = table_optimizer(tables.table_parameters(), optimizer)
    oracle = Oracle({n: w.detach() for n, w in tables.weights.items()}, 1, optimizer)
    for step in range(STEPS):
        examples, ids, weights = given = batch(step, 2)
        loss = batch_loss(examples, tables(ids, weights))
        rule.zero_grad()
        loss.backward()
        rule.step()
        assert float(loss.detach()) == pytest.approx(oracle.step([[given]])[0][0][0], rel=FP32)
    for name, weight in tables.weights.items():
        torch.testing.assert_close(
            weight.detach().double(), oracle.tables[0][name], rtol=0, atol=FP32
        )


@pytest.mark.parametrize("case", TRAINED)
def test_each_rank_counts_what_it_asked_for(case):
    for rank, seen in enumerate(trained(case)):
        turns = range(STEPS * case.passes)
        batches = [batch(turn, rank, sequences=case.sequences) for turn in turns]
        right = counted(batches)
        assert all(count.looked_up and count.unique for count in right.values())
        assert seen["counts"] == right
