"""What only a GPU shows: captured graphs, more elements than int32 counts, repeatable sums."""

import pytest
import torch

from gem_jagged.batch import Layout
from gem_jagged.ops import (
    concat_layouts,
    jagged_concat,
    jagged_dense_bmm,
    jagged_index_select,
    jagged_mean,
    jagged_sum,
    jagged_take_last,
    jagged_to_padded,
    last_layout,
    padded_to_jagged,
    select_layout,
)
from gem_opkit.testing import check_compiles_whole

pytestmark = pytest.mark.gpu


def test_a_captured_graph_follows_new_lengths():
    first, second = (0, 70, 3, 27), (40, 1, 0, 39)
    layout = Layout.from_lengths(first, device="cuda")
    values = torch.randn(100, 8, device="cuda")
    dense = torch.randn(4, 8, 8, device="cuda")
    other = Layout.constant(4, 2, device="cuda")

    def everything(layout, joined):
        return (
            jagged_to_padded(values, layout, length=70, align="right"),
            padded_to_jagged(jagged_to_padded(values, layout, length=70), layout),
            jagged_sum(values, layout),
            jagged_mean(values, layout),
            jagged_dense_bmm(values, layout, dense),
            jagged_concat(values, layout, values[:8], other, layout=joined)[0],
        )

    joined = concat_layouts(layout, other)
    everything(layout, joined)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = everything(layout, joined)
    graph.replay()
    # Fewer tokens than were captured; a new host length is not asked for.
    fewer = Layout.from_lengths(second, device="cuda")
    layout.offsets_O.copy_(fewer.offsets_O)
    for result in results:
        result.fill_(float("nan"))
    graph.replay()
    tokens = values[:80]
    expected = (
        jagged_to_padded(tokens, fewer, length=70, align="right", impl="reference"),
        tokens,
        jagged_sum(tokens, fewer, impl="reference"),
        jagged_mean(tokens, fewer, impl="reference"),
        jagged_dense_bmm(tokens, fewer, dense, impl="reference"),
        jagged_concat(tokens, fewer, values[:8], other, impl="reference")[0],
    )
    for result, right in zip(results, expected, strict=True):
        rows = right.shape[0]
        torch.testing.assert_close(result[:rows], right)
        assert result[rows:].eq(0).all()


@pytest.mark.large
def test_more_words_than_int32():
    # Rows of an odd number of bf16 are moved element by element, so that the kernels count beyond
    # 2^31 of their own words; of words of 8 bytes that would take 17 GB.
    length, width = 2**24, 97
    layout = Layout.from_lengths([0, length, length - 3], device="cuda", dtype=torch.int32)
    assert layout.total_tokens * width > 2**31
    values = torch.ones(layout.total_tokens, width, dtype=torch.bfloat16, device="cuda")
    values[-1] = 3
    padded = jagged_to_padded(values, layout, align="right")
    assert padded[2, -1].eq(3).all()
    assert padded[2, :3].eq(0).all()
    assert torch.equal(padded_to_jagged(padded, layout, align="right"), values)
    del padded
    # 2^24 ones, and 2^24 - 4 with a three: fp32 counts so far, and bf16 rounds to 2^24.
    assert jagged_sum(values, layout)[:, 0].tolist() == [0, length, length]
    kept, _ = jagged_take_last(values, layout, 2)
    assert kept[-1].eq(3).all()
    assert kept[:-1].eq(1).all()


def test_sums_have_the_same_bits_in_every_run():
    lengths = [1, 0, 5000, 3, 200_000, 70]
    layout = Layout.from_lengths(lengths, device="cuda")
    values = torch.randn(layout.total_tokens, 96, device="cuda", requires_grad=True)
    # The widths of the operators' own tests, whose compiled kernels serve here too.
    dense = torch.randn(6, 96, 72, device="cuda", requires_grad=True)
    chosen = torch.tensor([4, 1, 4, 4, 2])
    selected = select_layout(layout, chosen)
    chosen = chosen.cuda()

    def run():
        outs = (
            jagged_sum(values, layout),
            jagged_dense_bmm(values, layout, dense),
            jagged_index_select(values, layout, chosen, selected=selected)[0],
        )
        roots = [out.square().sum() for out in outs]
        return [*outs, *torch.autograd.grad(roots, [values, dense])]

    first = run()
    for _ in range(9):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
    alone = jagged_sum(values[5004:205_004], Layout.constant(1, 200_000, device="cuda"))
    assert torch.equal(alone[0], first[0][4])


def test_kernels_run_in_a_whole_graph():
    def inputs(lengths):
        layout = Layout.from_lengths(lengths, device="cuda")
        values = torch.randn(sum(lengths), 96, device="cuda", requires_grad=True)
        return values, layout, last_layout(layout, 3)

    def block(values, layout, kept):
        last, _ = jagged_take_last(values, layout, 3, kept=kept)
        padded = jagged_to_padded(last, kept, length=3)
        return jagged_mean(values, layout), padded_to_jagged(padded, kept)

    check_compiles_whole(block, [inputs((3, 0, 5)), inputs((2, 7, 2)), inputs((9, 4, 1, 1))])
