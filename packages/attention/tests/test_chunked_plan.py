"""The plan covers every visible pair once, in rectangles that a window keeps linear."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gem_attention.chunked.plan import plan_blocks, plan_shared, plan_window
from gem_attention.patterns import block_mask, visible_pairs, window_mask

CPU = torch.device("cpu")
side = st.one_of(st.none(), st.integers(0, 70))
pairs_of_lengths = st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), max_size=4)


def lengths_of(numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def covered(chunks, q_tokens, k_tokens, window):
    """Count how often each pair of packed tokens is computed and not hidden."""
    times = torch.zeros(q_tokens, k_tokens, dtype=torch.int64)
    for chunk in chunks:
        hidden = chunk.hidden_by_window(*window, CPU)
        tail = chunk.hidden_tail(CPU)
        for task in range(chunk.tasks):
            q_count, k_count, _, q_first, out_first, k_first = chunk.table[:, task].tolist()
            assert q_count > 0
            assert k_count > 0
            assert q_first == out_first
            shown = torch.ones(chunk.queries, chunk.keys, dtype=torch.bool)
            if hidden is not None:
                shown &= ~hidden[task if hidden.shape[0] > 1 else 0]
            if tail is not None:
                shown[:, chunk.least_keys :] &= ~tail[task]
            assert not shown[:, k_count:].any()
            assert shown[:q_count].any(1).all()
            times[q_first : q_first + q_count, k_first : k_first + k_count] += shown[
                :q_count, :k_count
            ].long()
    return times


@given(pairs_of_lengths, side, side)
def test_every_visible_pair_is_computed_once(pairs, left, right):
    q_lengths, k_lengths = [q for q, _ in pairs], [k for _, k in pairs]
    chunks = plan_window(lengths_of(q_lengths), lengths_of(k_lengths), left, right, CPU)
    times = covered(chunks, sum(q_lengths), sum(k_lengths), (left, right))
    masks = [window_mask(q, k, left, right) for q, k in pairs]
    expected = torch.block_diag(*masks) if masks else times
    assert torch.equal(times, expected.reshape(times.shape).long())


@given(st.lists(st.integers(0, 150), max_size=4), st.integers(1, 70))
def test_every_block_is_computed_once(lengths, block):
    chunks = plan_blocks(lengths_of(lengths), block, CPU)
    times = covered(chunks, sum(lengths), sum(lengths), (None, None))
    masks = [block_mask(n, block) for n in lengths]
    expected = torch.block_diag(*masks) if masks else times
    assert torch.equal(times, expected.reshape(times.shape).long())


def area(chunks):
    return sum(chunk.tasks * chunk.queries * chunk.keys for chunk in chunks)


def test_a_window_costs_its_pairs_however_long_the_sequence():
    for tokens in (1_000, 8_000, 64_000):
        lengths = lengths_of([tokens, tokens // 2])
        pairs = visible_pairs(lengths, lengths, 64, 64)
        assert area(plan_window(lengths, lengths, 64, 64, CPU)) < 1.7 * pairs


def test_blocks_cost_their_pairs_however_long_the_sequence():
    lengths = lengths_of([64_000, 31])
    # The short block may be padded to a whole one.
    assert area(plan_blocks(lengths, 64, CPU)) <= 64 * (64_000 + 64)


def test_causal_skips_most_of_the_empty_half():
    lengths = lengths_of([2_000])
    assert area(plan_window(lengths, lengths, None, 0, CPU)) < 0.65 * 2_000**2


def test_little_of_a_chunk_is_padding_and_none_is_large():
    lengths = torch.randint(0, 201, (256,))
    chunks = plan_window(lengths, lengths, None, None, CPU)
    assert area(chunks) < 1.15 * visible_pairs(lengths, lengths)
    assert max(chunk.tasks * chunk.queries * chunk.keys for chunk in chunks) <= 2**18
    assert len(chunks) < 40


def test_memory_of_one_long_sequence_is_bounded():
    lengths = lengths_of([16_384])
    for window in [(None, None), (None, 0), (500, 500)]:
        chunks = plan_window(lengths, lengths, *window, CPU)
        assert max(chunk.tasks * chunk.queries * chunk.keys for chunk in chunks) <= 2**19
    shared = plan_shared(4_096, lengths, CPU)
    assert max(chunk.tasks * chunk.queries * chunk.keys for chunk in shared) <= 2**19


def test_shared_queries_meet_every_sequence_that_has_keys():
    chunks = plan_shared(3, lengths_of([4, 0, 2]), CPU)
    tasks = sorted(tuple(row) for chunk in chunks for row in chunk.table.T.tolist())
    # q_count, k_count, diagonal, q_first, out_first, k_first
    assert tasks == [(3, 2, 0, 0, 6, 4), (3, 4, 0, 0, 0, 0)]


def test_a_plan_is_made_once_for_the_same_lengths():
    lengths = lengths_of([3, 5])
    first = plan_window(lengths, lengths, None, 0, CPU)
    assert plan_window(lengths.clone(), lengths.clone(), None, 0, CPU) is first
    assert plan_window(lengths, lengths, None, 1, CPU) is not first


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_nothing_visible_means_no_task(tokens):
    assert plan_window(lengths_of([tokens]), lengths_of([0]), None, None, CPU) == ()
    assert plan_window(lengths_of([0]), lengths_of([tokens]), None, None, CPU) == ()
