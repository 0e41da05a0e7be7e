import sys
from pathlib import Path

import pytest
import torch

from gem_embeddings.kernels.table_lookup.cost import (
    table_lookup_backward_cost,
    table_lookup_cost,
    table_lookup_id_weights_backward_cost,
)
from gem_embeddings.ops import TableLayout, TableSlot, id_weight_gradient, table_lookup
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_ragged_edges,
    check_reference_gradients,
    check_refuses,
    check_registration,
    count_launches,
    fresh,
    run_with_gradients,
)

sys.path.insert(0, str(Path(__file__).parent))

from table_calls import batch_of, oracle, spoilt

LENGTHS = (3, 0, 6, 1)


def lookup(weights, ids, bags, id_weights, layout, counts, impl="auto"):
    _, views = table_lookup(
        weights, ids, bags, layout, counts=counts, id_weights_I=id_weights, impl=impl
    )
    return views


def wide_oracle(weights, ids, bags, id_weights, layout, counts):
    """Sum in fp32 at least and give that out, whatever the rows are, as the operator does."""
    wide = torch.promote_types(weights.dtype, torch.float32)
    return oracle(weights.to(wide), ids, bags, id_weights.to(wide), layout, counts)


def inputs(lengths, **options):
    weights, ids, bags, id_weights, layout, counts = batch_of(lengths, **options)
    return weights.requires_grad_(), ids, bags, id_weights.requires_grad_(), layout, counts


def test_reference_gradients():
    check_reference_gradients(lookup, inputs(LENGTHS), reference=oracle)


def test_registration():
    weights, ids, bags, id_weights, layout, counts = inputs(LENGTHS)
    sizes = {
        "ids": [10] * 4,
        "vectors": [4, 10, 4, 4],
        "rows": [10] * 4,
        "widths": [4, 6, 6, 4],
    }
    check_registration(
        torch.ops.gem_embeddings.table_lookup,
        (weights, ids, bags, id_weights, layout.slots, counts, 40, torch.float32, "reference"),
        cost=table_lookup_cost(**sizes, weighted=True),
        backward_cost=table_lookup_backward_cost(**sizes, weighted=True)
        + table_lookup_id_weights_backward_cost(**sizes),
    )
    grad = torch.randn(4 * 4 + 10 * 6 + 4 * 6 + 4 * 4)
    check_registration(
        torch.ops.gem_embeddings.table_lookup_backward,
        (grad, ids, bags, id_weights.detach(), layout.slots, counts, weights.detach(), "reference"),
        cost=table_lookup_backward_cost(**sizes, weighted=True),
    )
    check_registration(
        torch.ops.gem_embeddings.table_lookup_id_weights_backward,
        (grad, weights.detach(), ids, bags, layout.slots, counts, "reference"),
        cost=table_lookup_id_weights_backward_cost(**sizes),
    )


def test_compiles_whole():
    sets = [inputs(lengths) for lengths in ((3, 0, 5), (2, 7, 2), (9, 4, 3, 5))]
    check_compiles_whole(lookup, sets, max_graphs=3)


@pytest.mark.interpreter
def test_interpreted_kernel():
    # A bag of several pieces, and a class of widths beside another.
    check_interpreted_kernel(lookup, oracle, inputs((3, 0, 150), hot=True))
    one = [(7, 8)], [(0, "sum")]
    check_interpreted_kernel(lookup, oracle, inputs((3, 0, 9), shapes=one[0], features=one[1]))


@pytest.mark.gpu
def test_kernel_on_gpu():
    shapes = [(700, 128), (90, 100)]
    batch = inputs((30, 0, 5, 300, 1), shapes=shapes, hot=True)
    check_kernel_on_gpu(lookup, wide_oracle, batch)


def test_ragged_edges():
    check_ragged_edges(lookup, oracle, lambda case: inputs(case.lengths))


def test_alone_equals_in_batch():
    features = [(0, "sum"), (1, "mean")]
    weights, ids, bags, id_weights, layout, _ = batch_of(LENGTHS, features=features)
    id_weights.requires_grad_()
    weights.requires_grad_()

    def make(picked):
        begins = bags.tolist()
        kept = [f * len(LENGTHS) + b for f in range(2) for b in picked]
        places = torch.cat([torch.arange(begins[b], begins[b + 1]) for b in kept])
        lengths = torch.tensor([begins[b + 1] - begins[b] for b in kept])
        new = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        counts = lengths.view(2, -1).sum(1).tolist()
        return weights, ids[places], new, id_weights[places], layout, counts

    check_alone_equals_in_batch(
        lookup, make, LENGTHS, leaves=[weights, id_weights], split="sequences", bitwise=True
    )


def test_refuses():
    weights, ids, bags, id_weights, layout, counts = batch_of(LENGTHS)
    rows = [
        ({"counts": counts[:3]}, ShapeError, "counts must have one count for each of 4"),
        ({"ids": ids[:9]}, ShapeError, "ids_I must have 40 ids"),
        ({"bags": bags[:-1]}, ShapeError, r"bags_O must have F·B \+ 1 offsets"),
        ({"weights": weights[:9]}, ShapeError, "hold the 82 elements"),
        ({"weights": weights.view(1, -1)}, ShapeError, "weights_N must have one dim"),
        ({"id_weights": id_weights[:3]}, ShapeError, "one weight for each of 40 ids"),
        ({"ids": ids.float()}, DtypeError, "ids_I must be one of torch.int64"),
        ({"weights": weights.long()}, DtypeError, "weights_N must be one of"),
        # The first feature has bags 0 to 4 of the ids 0 to 10.
        ({"bags": bags + 1}, ShapeError, "bags_O must run from 0 to 10 for feature 0; got 1 to 11"),
        ({"bags": spoilt(bags, {1: 9, 2: 3})}, ShapeError, "bags_O must never fall"),
        ({"bags": spoilt(bags, {-1: 39})}, ShapeError, "run from 30 to 40 for feature 3; got 30"),
        ({"bags": bags.to("meta")}, DeviceError, "bags_O must be on cpu"),
        ({"impl": "fast"}, UnsupportedError, "impl must be one of"),
    ]
    given = {
        "weights": weights, "ids": ids, "bags": bags, "id_weights": id_weights,
        "layout": layout, "counts": counts,
    }  # fmt: skip
    check_refuses(
        [(lambda c=c: lookup(**{**given, **c}), error, text) for c, error, text in rows]
        + [
            (
                lambda: TableLayout((TableSlot(0, 3, 2, 0), TableSlot(4, 3, 2, 3)), ()),
                ConfigError,
                r"have elements of their own; got \(0, 6\) and \(4, 10\)",
            ),
            (
                lambda: TableLayout((TableSlot(0, 3, 2, 0), TableSlot(6, 3, 2, 2)), ()),
                ConfigError,
                "have row numbers of their own",
            ),
            (lambda: TableLayout.packed([(3, 0)], []), ConfigError, "a width above 0"),
            (lambda: TableLayout.packed([(3, 4)], [(1, "sum")]), ConfigError, "be below 1"),
            (lambda: TableLayout.packed([(3, 4)], [(0, "max")]), ConfigError, "sum, mean or none"),
        ]
    )


@pytest.mark.interpreter
def test_halves_are_summed_in_fp32():
    weights, ids, bags, _, layout, counts = batch_of((3, 0, 70), dtype=torch.float16, hot=True)
    for impl in ("reference", "triton"):
        flat, _ = table_lookup(weights, ids, bags, layout, counts=counts, impl=impl)
        assert flat.dtype == torch.float32
        ones = torch.ones(ids.shape[0])
        expected = oracle(weights.double(), ids, bags, ones.double(), layout, counts)
        expected = torch.cat([out.flatten() for out in expected])
        torch.testing.assert_close(flat.double(), expected, rtol=1e-5, atol=1e-5)
        half, _ = table_lookup(
            weights, ids, bags, layout, counts=counts, out_dtype=torch.float16, impl=impl
        )
        torch.testing.assert_close(half, flat.half())


@pytest.mark.interpreter
def test_an_outsider_reads_no_memory_and_leaves_no_trace():
    weights = torch.full((8,), float("nan"))
    weights[4:] = 1.0
    layout = TableLayout.packed([(2, 4)], [(0, "sum")])
    ids, bags = torch.tensor([-1, 2, 2**40]), torch.tensor([0, 1, 3])
    for impl in ("reference", "triton"):
        leaf = weights.clone().requires_grad_()
        _, (out,) = table_lookup(leaf, ids, bags, layout, counts=[3], impl=impl)
        out.sum().backward()
        assert out.tolist() == [[0.0] * 4] * 2
        assert leaf.grad.tolist() == [0.0] * 8


@pytest.mark.interpreter
def test_a_long_feature_starts_no_programs_for_short_ones():
    """Without pooling a feature has as many rows as ids: here 40, 0, 2 and 3 of them."""
    layout = TableLayout.packed(
        [(9, 4), (5, 4)], [(0, "none"), (1, "none"), (1, "none"), (0, "none")]
    )
    weights, counts = torch.randn(56), [40, 0, 2, 3]
    ids = torch.cat([torch.randint(9, (40,)), torch.randint(5, (2,)), torch.tensor([8, -1, 0])])
    bags = torch.tensor([0, 40, 40, 42, 45])
    flat, plain = (
        table_lookup(weights, ids, bags, layout, counts=counts, impl=impl)[0]
        for impl in ("triton", "reference")
    )
    assert torch.equal(flat, plain)
    with count_launches() as together:
        table_lookup(weights, ids, bags, layout, counts=counts, impl="triton")
    with count_launches() as alone:
        table_lookup(
            weights,
            ids[:6],
            torch.tensor([0, 1, 2, 4, 6]),
            layout,
            counts=[1, 1, 2, 2],
            impl="triton",
        )
    assert together.count == alone.count + 1  # the long one has a launch of its own


@pytest.mark.interpreter
def test_a_bound_on_lengths_changes_nothing():
    weights, ids, bags, _, layout, counts = batch_of((3, 0, 9))
    flats = [
        table_lookup(weights, ids, bags, layout, counts=counts, longest=bound, impl="triton")[0]
        for bound in (None, 9)
    ]
    assert torch.equal(*flats)


def test_gradient_of_weights_without_a_graph():
    weights, ids, bags, id_weights, layout, counts = batch_of(LENGTHS)
    run = run_with_gradients(lookup, fresh(inputs(LENGTHS)))
    upstream = torch.cat([torch.randn_like(out).flatten() for out in run.outputs])
    leaf = id_weights.clone().requires_grad_()
    flat, _ = table_lookup(weights, ids, bags, layout, counts=counts, id_weights_I=leaf)
    flat.backward(upstream)
    got = id_weight_gradient(upstream, weights, ids, bags, layout, counts=counts)
    assert torch.equal(got, leaf.grad)


def test_tables_may_have_gaps_and_no_rows():
    from gem_embeddings.ops import FeatureSlot, TableSlot

    tables = (TableSlot(8, 2, 4, 0), TableSlot(0, 0, 4, 2), TableSlot(20, 1, 2, 5))
    layout = TableLayout(tables, tuple(FeatureSlot(i, "sum") for i in range(3)))
    assert (layout.elements, layout.rows) == (22, 6)
    weights = torch.arange(22.0)
    ids, bags = torch.tensor([1, 0, 0]), torch.tensor([0, 1, 2, 3])
    _, views = table_lookup(weights, ids, bags, layout, counts=[1, 1, 1])
    assert [view.tolist() for view in views] == [[[12.0, 13, 14, 15]], [[0.0] * 4], [[20.0, 21]]]
