"""Every kernel compiles for Hopper and Blackwell as the operators really launch it."""

import sys
from pathlib import Path

import pytest
import torch

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.ops import id_weight_gradient, table_lookup, table_update
from gem_opkit.compile_checks import compile_kernels

sys.path.insert(0, str(Path(__file__).parent))

from launches import recorded_launches
from table_calls import batch_of


def launch_all(dtype, specs, *, shapes, features):
    weights, ids, bags, id_weights, layout, counts = batch_of(
        (2, 70), shapes=shapes, features=features, dtype=dtype
    )
    given = {"counts": counts, "impl": "triton"}
    flat, _ = table_lookup(weights, ids, bags, layout, id_weights_I=id_weights, **given)
    id_weight_gradient(flat, weights, ids, bags, layout, **given)
    for spec in specs:
        size = layout.rows if spec.kind == "rowwise_adagrad" else layout.elements
        states = [torch.zeros(size)] * {"sgd": 0, "adam": 2}.get(spec.kind, 1)
        table_update(weights, states, ids, bags, flat, layout, spec=spec, seed=1, **given)


def compiled(variants, *, only=(), capabilities=(90,)):
    for module, found in variants.items():
        chosen = [v for v in found.values() if not only or v.kernel in only]
        if chosen:
            yield from compile_kernels(module, chosen, capabilities=capabilities)


@pytest.mark.interpreter
def test_wide_rows_move_in_vectors_and_spill_nothing(monkeypatch):
    import gem_embeddings.merging.kernel as merging

    monkeypatch.setattr(merging, "_SPAN", 4)  # of interpreted programs; the code is the same
    with recorded_launches() as variants:
        specs = [OptimizerSpec(kind="rowwise_adagrad")]
        features = [(0, "sum"), (0, "none")]
        launch_all(torch.float32, specs, shapes=[(9, 128)], features=features)
    names = {variant.kernel for found in variants.values() for variant in found.values()}
    assert len(names) == 10
    for done in compiled(variants, capabilities=(90, 100)):
        kernel = done.variant.kernel
        assert done.stack_bytes == 0, f"{kernel} spills on sm_{done.capability}"
        if kernel not in ("_begins_kernel", "_key_kernel", "_line_kernel"):
            assert "ld.global.v4" in done.ptx, kernel


@pytest.mark.interpreter
def test_adam_on_half_rows_of_mixed_widths_compiles(monkeypatch):
    import gem_embeddings.merging.kernel as merging

    monkeypatch.setattr(merging, "_SPAN", 4)
    with recorded_launches() as variants:
        features, shapes = [(0, "sum"), (1, "mean")], [(5, 50), (9, 128)]
        launch_all(torch.float16, [OptimizerSpec(kind="adam")], shapes=shapes, features=features)
    merges = list(compiled(variants, only=("_merge_kernel",)))
    assert [done.variant.constants["CLASS"] for done in merges] == [0, 1]
