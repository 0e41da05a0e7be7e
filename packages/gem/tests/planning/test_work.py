"""The counted work of a recipe against the real modules, torch's own hooks and the reader."""

import contextlib

import pytest
import torch

from gem.config import load_recipe, shipped_recipes
from gem.data.dataset import Dataset
from gem.data.prepare import prepare
from gem.data.reader import open_reader
from gem.dry_run.inputs import random_batch
from gem.model.build import build_model, model_tables
from gem.model.expert_kinds import AttentionExpert
from gem.model.flops import total_flops, training_flops
from gem.model.model_presets import shipped_presets
from gem.model.spec import GemSpec
from gem.planning.lengths import LengthLaw
from gem.planning.schema import declared_schema
from gem.planning.tables import tables_of
from gem.planning.work import work_of
from gem_opkit.errors import ConfigError, UnsupportedError
from gem_parallel.contract import ParallelPlan
from gem_parallel.topology import preset

H200_TABLES = load_recipe("h200").data.hash_rows
# The recipe h200 with every width cut down.
SMALL = (
    *(f"data.hash_rows.{table}=40" for table in H200_TABLES),
    *("model.width=64", "model.stream.width=64", "model.stream.heads=2", "model.stream.seeds=32"),
    *("model.stream.summary_tokens=8", "model.stream.kron_rank=4", "model.summary_tokens=16"),
    *("model.summary_hidden=64", "model.embeddings.embedding_dim=16", "model.experts.rank=8"),
    *("model.experts.fm_tokens=8", "model.experts.linear_tokens=8"),
    *("model.experts.mlp_widths=[96, 96]", "model.heads.trunk_widths=[32]"),
    *("data.synthetic.max_backlog_events=300", "train.batch_examples=8"),
)
VARIANTS = (
    (),
    ("model.stream.target_tokens=2", "model.stream.qk_norm=false", "model.stream.token_hidden=24"),
    ("model.experts.count=3", 'model.experts.projection="attentive"', "model.experts.rank=4"),
    ("model.stream.width=32", 'model.stream.pattern="block"', "model.stream.full_layers=[]"),
    (
        'model.experts.partition="all"',
        "model.experts.residual=false",
        "model.transformer_gate=false",
    ),
    ("model.heads.task_widths=[16]", "model.heads.domain_outputs=false"),
)

# Parts of other models, each in one of the layers that h200 has.
NARROW = ("model.stream.width=32", "model.width=64")
OTHERS = (
    ("model.stream.ffn=none", "model.stream.recent_tokens=3", *NARROW),
    ("model.stream.pooling=pma", "model.stream.target_tokens=2"),
    ("model.stream.pooling=mean", "model.stream.summary_tokens=3"),
    ("model.stream.pooling=mean", "model.stream.ffn=none", "model.stream.summary_tokens=1"),
    ("model.stream.target_tokens=1", "model.stream.target_attention=din", "model.stream.ffn=none"),
    ("model.stream.ffn_hidden=96",),
    ('model.layers=["both", "transformer", "interaction", "both"]', "model.stream.full_layers=[]"),
    *(
        (f'model.experts.kinds=["{kind}"]', 'model.experts.partition="all"')
        for kind in ("cross", "dot", "mlp", "attention")
    ),
    ("model.experts.count=3", 'model.experts.kinds=["dot", "wukong", "attention"]'),
)
# Models of users: their layers read nothing of the candidate, their heads do.
_FOR_USERS = ("model.stream.target_tokens=0", 'model.experts.partition="all"')
OF_USERS = (
    ("model.user_model={}", *_FOR_USERS),
    (
        "model.user_model={ width = 16, candidate_hidden = 24, time_gap_knots = 5 }",
        "model.heads.trunk_widths=[]",
        *_FOR_USERS,
    ),
)
EVERY = (*VARIANTS, *OTHERS, *OF_USERS)


def named(settings):
    return " ".join(settings) or "as shipped"


def small(*settings):
    return load_recipe("h200", [*SMALL, 'precision.default="fp32"', *settings])


@pytest.mark.parametrize("settings", EVERY, ids=named)
def test_parameters_are_those_of_the_modules(settings):
    config = small(*settings)
    schema = declared_schema(config)
    model = build_model(config.model, schema)
    real = {
        name: (p.shape[0], p.numel())
        for name, p in model.named_parameters()
        if not name.startswith("tables.")
    }
    counted = {p.name: (p.rows, p.elements) for p in work_of(config, schema).parameters()}
    assert counted == real


def shipped_models():
    """Every shipped recipe of the hybrid model's kind, and every preset, on generated data."""
    for name in shipped_recipes():
        model = load_recipe(name).model
        if isinstance(model, GemSpec):
            heads = model.heads.model_copy(update={"base_rates": {}, "task_weights": {}})
            # What names the inputs of a data set stays with that data set.
            apart = {"streams": {}, "leave_out": (), "heads": heads}
            if model.user_model is not None:
                apart["user_model"] = model.user_model.model_copy(update={"next_event_task": None})
            yield pytest.param(model.model_copy(update=apart), id=name)
    for name in shipped_presets():
        model = load_recipe("synthetic-debug", [f"model.preset={name}"]).model
        yield pytest.param(model, id=f"preset {name}")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["model.distillation={}"], "model.distillation"),
        (["data.teacher.folder=x"], "data.teacher"),
        (["data.user_embeddings.up.folder=x"], "data.user_embeddings"),
    ],
)
def test_what_models_give_one_another_is_not_planned(texts, said):
    config = load_recipe("synthetic-debug", texts)
    with pytest.raises(UnsupportedError, match=rf"{said} must be left out"):
        work_of(config)


@pytest.mark.parametrize("model", [*shipped_models()])
def test_models_of_all_recipes_and_presets_are_planned(model):
    config = load_recipe("synthetic-debug").model_copy(update={"model": model})
    schema = declared_schema(config)
    work = work_of(config, schema)
    with torch.device("meta"):
        real = build_model(model, schema)
    shapes = {n: p.numel() for n, p in real.named_parameters() if not n.startswith("tables.")}
    assert {p.name: p.elements for p in work.parameters()} == shapes
    assert min(op.forward.flops for unit in work.units for op in unit.all_operators()) >= 0
    assert min(unit.kept_bytes for unit in work.units) >= 0


@pytest.mark.parametrize("settings", EVERY, ids=named)
def test_flops_are_those_that_every_mfu_rests_on(settings):
    config = small(*settings)
    schema = declared_schema(config)
    lengths = LengthLaw(1, 300).quantiles(8)
    wanted = training_flops(config.model, schema, examples=8, lengths={"impressions": lengths})
    work = work_of(config, schema)
    assert work.flops() == total_flops(wanted.values()).total
    assert min(op.forward.flops for unit in work.units for op in unit.all_operators()) >= 0


def saved_bytes(model, batch, autocast):
    """Bytes of all that autograd saves in a forward pass, parameters and buffers left out."""
    lasting = (*model.parameters(), *model.buffers())
    own = {each.untyped_storage().data_ptr() for each in lasting}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        model(batch)
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)


@pytest.mark.parametrize(
    ("precision", "allowed"),
    # Counted is what a GPU keeps. In fp32 a norm on a CPU keeps its output in place of its input.
    [("fp32", 0.10), ("bf16_autocast", 0.04)],
)
def test_kept_bytes_are_what_autograd_saves(precision, allowed):
    counted, real = kept_bytes(f'precision.default="{precision}"', most=1000)
    assert counted == pytest.approx(real, rel=allowed)


@pytest.mark.parametrize("settings", [*OTHERS, *OF_USERS], ids=named)
@pytest.mark.parametrize("most", [4, 300])  # mostly of examples, mostly of events
def test_kept_bytes_of_other_models_are_what_autograd_saves(settings, most):
    counted, real = kept_bytes('precision.default="bf16_autocast"', *settings, most=most)
    assert counted == pytest.approx(real, rel=0.04)


def test_kept_bytes_of_all_pairs_of_users_and_items_are_what_autograd_saves():
    # Of 512 examples the pairs are a third of what the heads keep.
    half = 'precision.default="bf16_autocast"'
    counted, real = kept_bytes(half, *OF_USERS[0], most=4, examples=512)
    assert counted == pytest.approx(real, rel=0.02)


def kept_bytes(*settings, most, examples=8):
    """Bytes that are kept, counted and saved by autograd, without copies of weights."""
    sizes = (f"data.synthetic.max_backlog_events={most}", f"train.batch_examples={examples}")
    config = small(*settings, *sizes)
    schema = declared_schema(config)
    work = work_of(config, schema)
    model = build_model(config.model, schema)
    lengths = {"impressions": LengthLaw(1, most).quantiles(examples)}
    batch = random_batch(schema, lengths, torch.Generator().manual_seed(0))
    half = config.precision.default != "fp32"
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if half else contextlib.nullcontext()
    real = saved_bytes(model, batch, autocast)
    counted = sum(u.kept_bytes + sum(e.kept_bytes for e in u.experts) for u in work.units)
    copies = 2 * sum(p.elements for p in work.parameters()) if half else 0
    # Autocast widens a softmax to fp32 on a GPU alone.
    among = [m for m in model.modules() if half and isinstance(m, AttentionExpert)]
    wide = sum(4 * examples * m.heads * m.compress.weight.shape[1] ** 2 for m in among)
    return counted - wide, real - copies


def test_tables_are_those_of_the_model():
    config = small()
    schema = declared_schema(config)
    specs, lookups = model_tables(build_model(config.model, schema))
    counted = tables_of(config, schema)
    assert list(counted.specs) == specs
    assert list(counted.lookups) == lookups
    assert {load.feature_name for load in counted.loads} == {x.feature_name for x in lookups}


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("synthetic-debug", ()),
        ("h200", ("data.synthetic.features=24", "data.synthetic.max_backlog_events=9")),
        ("synthetic-debug", ('data.inputs=["item_id", "price", "tags"]', "data.statistics=[]")),
    ],
)
def test_declared_schema_is_the_readers(recipe, settings, tmp_path):
    cut = ("data.synthetic.rows=60", "data.synthetic.users=9", "data.synthetic.items=20")
    transforms = ("data.transforms={}",) if recipe == "synthetic-debug" and settings else ()
    config = load_recipe(recipe, [*cut, *settings, *transforms])
    prepare("synthetic", tmp_path / "data", options=config.data.synthetic)
    reader = open_reader(tmp_path / "data", config.data, batch_size=4)
    assert declared_schema(config) == reader.schema
    # And from the contract on the disk.
    there = config.model_copy(
        update={"data": config.data.model_copy(update={"folder": str(tmp_path / "data")})}
    )
    assert declared_schema(there) == reader.schema


def test_declared_schema_refuses_what_the_data_has_not():
    with pytest.raises(ConfigError, match=r"data.inputs must name .*'prise'.*price"):
        declared_schema(load_recipe("synthetic-debug", ['data.inputs=["prise"]']))
    with pytest.raises(ConfigError, match=r"data.streams.clicks.fields .*'item'"):
        declared_schema(load_recipe("synthetic-debug", ['data.streams.clicks.fields=["item"]']))


def test_lengths_stand_for_their_law():
    assert LengthLaw(1, 8).quantiles(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert LengthLaw(0, 9).quantiles(5, most=6) == [1, 3, 5, 6, 6]
    # P(1) = 1 / (1 + 1/4 + 1/9) = 0.735 for alpha 2 on 1 to 3.
    drawn = LengthLaw(1, 3, 2.0).quantiles(1000)
    assert drawn.count(1) == 735
    assert drawn == sorted(drawn)


def test_generated_histories_have_the_lengths_that_are_planned_for(tmp_path):
    config = load_recipe("h200", ["data.synthetic.rows=1", "data.synthetic.users=2000"])
    options = config.data.synthetic.model_copy(
        update={"max_backlog_events": 50, "items": 20, "features": 0, "hashed_ids": False}
    )
    prepare("synthetic", tmp_path / "data", options=options)
    users = Dataset.open(tmp_path / "data").events("impressions", ["user_id"])["user_id"].values
    counts = torch.from_numpy(users).bincount()[1:].double()
    planned = torch.tensor(LengthLaw(1, 50).quantiles(2000), dtype=torch.float64)
    assert counts.mean().item() == pytest.approx(planned.mean().item(), rel=0.04)
    assert counts.std().item() == pytest.approx(planned.std().item(), rel=0.05)


def test_plan_of_the_comparison_model_is_refused():
    config = load_recipe("synthetic-debug", ['model={kind="din"}'])
    with pytest.raises(UnsupportedError, match=r"model.kind must be \"gem\""):
        work_of(config)


def test_formats_that_are_not_counted_are_refused():
    with pytest.raises(UnsupportedError, match=r"precision must be one of fp32, bf16_autocast"):
        work_of(small('precision.default="mxfp8"'))


def test_whole_tables_on_every_rank_merge_the_rows_of_all():
    tables = tables_of(small())
    one = tables.step(ParallelPlan(), preset("h200"))
    two = tables.step(ParallelPlan.data_parallel(2), preset("h200x2"))
    assert one.traffic == ()
    assert two.held_bytes == one.held_bytes == 26 * 40 * (16 + 1) * 4
    (merged,) = two.traffic
    assert (merged.axis, merged.collective) == ("world", "all_gather")
    # 8 bytes of id and 16 elements a different row: at most one row for each id.
    events = sum(LengthLaw(1, 300).quantiles(8))
    assert 26 * (8 + 64) < merged.given_bytes <= (26 * 8 + events) * (8 + 64)


def test_fully_sharded_tables_are_held_once():
    tables = tables_of(small())
    topology = preset("h200x8")
    plain, fully = (
        tables.step(
            ParallelPlan(replicate=8, table_shard=2, table_replicate=4, fully_sharded_tables=each),
            topology,
        )
        for each in (False, True)
    )
    assert fully.held_bytes < 0.4 * plain.held_bytes
    assert fully.gathered_bytes > 0 == plain.gathered_bytes
    assert {each.collective for each in fully.traffic if each.axis == "table_replicate"} == {
        "all_gather",
        "reduce_scatter",
    }


def test_copies_that_merge_gradients_average_no_rows():
    topology = preset("h200x8")
    plan = ParallelPlan(replicate=8, table_shard=2, table_replicate=4)
    averaged = tables_of(small()).step(plan, topology)
    merged = tables_of(small("parallel.replicate=8", "parallel.table_replicas=gradients"))
    found = merged.step(plan, topology)
    between = [each for each in found.traffic if each.axis == "table_replicate"]
    assert [each.collective for each in between] == ["all_gather"]
    assert [e.collective for e in averaged.traffic if e.axis == "table_replicate"] == ["all_reduce"]
    # At most all rows of its half, each with an id and 16 elements.
    assert 0 < between[0].given_bytes <= 26 * 40 / 2 * (8 + 64)
    assert found.local_ms > averaged.local_ms
