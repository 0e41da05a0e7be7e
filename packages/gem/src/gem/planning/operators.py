"""What the parts of the model do with memory: bytes moved, and copies kept for the backward pass.

FLOPs come from `gem.model.flops`. Bytes of elementwise work are those of the operators that the
modules call on a GPU (norms fused, the rest eager), each tensor read and written once. What is kept
follows what autograd saves; a test holds it to autograd's own hooks over the real modules.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gem.model.flops import PassFlops
from gem.model.spec import GemSpec
from gem.model.stream_spec import StreamSpec
from gem_attention.costs import (
    block_attention_backward_cost,
    block_attention_cost,
    block_pairs_in_sequence,
    generalized_attention_backward_cost,
    generalized_attention_cost,
    jagged_flash_attention_backward_cost,
    jagged_flash_attention_cost,
    pooled_attention_backward_cost,
    pooled_attention_cost,
    rotary_heads_backward_cost,
    rotary_heads_cost,
    visible_pairs_in_sequence,
)
from gem_jagged.costs import jagged_mean_backward_cost, jagged_mean_cost
from gem_opkit.cost import Cost
from gem_parallel.planning.work import Operator, Parameter
from gem_precision.costs import row_norm_backward_cost, row_norm_cost

_WIDE = 4  # bytes of fp32
_PLACE = 8  # bytes of an index


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the counts of one rank's batch are made from.

    Attributes:
        examples: examples of a rank.
        lengths: events of each example, of one stream.
        element_bytes: bytes of an element in products and activations.
    """

    examples: int
    lengths: Sequence[int]
    element_bytes: int

    @property
    def tokens(self) -> int:
        """Events of all examples."""
        return sum(self.lengths)


@dataclass(slots=True)
class Passes:
    """Bytes of elementwise work and of what is kept, added up.

    Attributes:
        forward: bytes read and written in the forward pass.
        backward: the same in the backward pass.
        kept: bytes kept between the two.
    """

    forward: int = 0
    backward: int = 0
    kept: int = 0

    def add(self, elements: int, forward: float, backward: float, kept: float = 0.0) -> None:
        """Count work over some elements.

        Args:
            elements: how many.
            forward: bytes an element, forward.
            backward: bytes an element, backward.
            kept: bytes an element that are kept.
        """
        self.forward += round(elements * forward)
        self.backward += round(elements * backward)
        self.kept += round(elements * kept)

    def row_norm(self, rows: int, width: int, element: int, *, keeps_input: bool = True) -> None:
        """Count a norm of rows, fused: it keeps its input, which may be counted elsewhere."""
        self.forward += row_norm_cost(rows=rows, width=width, element_bytes=element).bytes
        cost = row_norm_backward_cost(rows=rows, width=width, element_bytes=element)
        self.backward += cost.bytes
        self.kept += rows * width * element if keeps_input else 0

    def operator(self) -> Operator:
        """The elementwise work as one operator.

        Returns:
            bytes without FLOPs, of the kind ``elementwise``.
        """
        return Operator("elementwise", Cost(0, self.forward), Cost(0, self.backward))


def product(flops: PassFlops, rows: int, parameters: Sequence[Parameter], element: int) -> Operator:
    """Products with weights: their FLOPs, and inputs, outputs and weights moved once.

    Args:
        flops: of all of them.
        rows: rows of each product's input.
        parameters: the weights.
        element: bytes of an element.

    Returns:
        the operator; its backward moves each of input, weight and gradient twice.
    """
    moved = sum(rows * (p.rows + p.columns) + p.elements for p in parameters) * element
    return Operator("matmul", Cost(flops.forward, moved), Cost(flops.backward, 2 * moved))


def _heads(own: StreamSpec, element: int) -> dict[str, int]:
    width = own.width // own.heads
    return {
        "heads": own.heads,
        "kv_heads": own.heads,
        "head_width": width,
        "value_width": width,
        "element_bytes": element,
    }


def _attention(
    kind: str, forward: Callable[..., Cost], backward: Callable[..., Cost], sizes: Mapping[str, Any]
) -> Operator:
    return Operator(kind, forward(**sizes), backward(**sizes))


def self_attention(own: StreamSpec, sizes: Sizes) -> Operator:
    """Self-attention of a transformer layer.

    Args:
        own: the stream in that layer.
        sizes: the batch.

    Returns:
        one operator, of the kind of its pattern.
    """
    heads = _heads(own, sizes.element_bytes)
    if own.pattern == "block":
        pairs = sum(block_pairs_in_sequence(n, own.block_tokens) for n in sizes.lengths)
        given = {"visible_pairs": pairs, "tokens": sizes.tokens, **heads}
        return _attention("block", block_attention_cost, block_attention_backward_cost, given)
    reach = own.window_tokens if own.pattern == "window" else None
    pairs = sum(visible_pairs_in_sequence(n, n, reach, reach) for n in sizes.lengths)
    given = {
        "visible_pairs": pairs,
        "q_tokens": sizes.tokens,
        "k_tokens": sizes.tokens,
        **heads,
    }
    kind = "window" if own.pattern == "window" else "attention"
    return _attention(
        kind, jagged_flash_attention_cost, jagged_flash_attention_backward_cost, given
    )


def pooling_attention(spec: GemSpec, own: StreamSpec, sizes: Sizes) -> list[Operator]:
    """Attention of an interaction layer: GDPA, seed pooling, pooling by the candidate.

    Args:
        spec: the model.
        own: the stream.
        sizes: the batch.

    Returns:
        one operator for each of them that the stream has.
    """
    heads, tokens = _heads(own, sizes.element_bytes), sizes.tokens
    found: list[Operator] = []
    if own.ffn == "gdpa":
        given = {
            "visible_pairs": spec.summary_tokens * tokens,
            "q_tokens": tokens,
            "k_tokens": sizes.examples * spec.summary_tokens,
            **heads,
        }
        found.append(
            _attention(
                "gdpa", generalized_attention_cost, generalized_attention_backward_cost, given
            )
        )
    if own.summary_tokens and own.pooling != "mean":
        seeds = own.seeds if own.pooling == "hsp" else own.summary_tokens
        given = {"batch": sizes.examples, "seeds": seeds, "k_tokens": tokens, **heads}
        found.append(
            _attention("pooled", pooled_attention_cost, pooled_attention_backward_cost, given)
        )
    if own.target_tokens and own.target_attention == "softmax":
        given = {
            "visible_pairs": own.target_tokens * tokens,
            "q_tokens": sizes.examples * own.target_tokens,
            "k_tokens": tokens,
            **heads,
        }
        found.append(
            _attention(
                "pooled", jagged_flash_attention_cost, jagged_flash_attention_backward_cost, given
            )
        )
    return found


def mean_pooling(own: StreamSpec, sizes: Sizes) -> list[Operator]:
    """The means of histories that a stream's pooling and its DIN attention take.

    Args:
        own: the stream.
        sizes: the batch.

    Returns:
        one operator for each of them that the stream has.
    """
    count = int(own.summary_tokens > 0 and own.pooling == "mean")
    count += int(own.target_tokens > 0 and own.target_attention == "din")
    given = {"batch": sizes.examples, "total_tokens": sizes.tokens, "width": own.width}
    given |= {"element_bytes": sizes.element_bytes}
    mean = Operator("elementwise", jagged_mean_cost(**given), jagged_mean_backward_cost(**given))
    return [mean] * count


def transformer_passes(
    own: StreamSpec, sizes: Sizes, *, gated: bool, input_is_kept: bool
) -> Passes:
    """Elementwise work and kept bytes of self-attention of a stream, and of an MLP behind it.

    Args:
        own: the stream in that layer.
        sizes: the batch.
        gated: whether the summary gates what the attention gives.
        input_is_kept: as in `interaction_passes`.

    Returns:
        bytes of a rank's batch.
    """
    e, tokens, width = sizes.element_bytes, sizes.tokens, own.width
    found = Passes()
    found.row_norm(tokens, width, e, keeps_input=not input_is_kept)
    found.add(tokens * width, 0, 0, e)  # the norm's output, which the product keeps
    found.add(3 * tokens * width, 0, 0, e)  # queries, keys and values
    if own.pattern != "block" and (own.qk_norm or own.rotary != "none"):
        heads = {"heads": own.heads, "key_heads": own.heads, "width": width // own.heads}
        heads |= {"total_tokens": tokens, "element_bytes": e}
        found.forward += rotary_heads_cost(**heads, copies_values=False).bytes
        found.backward += rotary_heads_backward_cost(**heads, normed=own.qk_norm).bytes
        found.add(3 * tokens * width, 0, 0, e)  # what they have become
    elif own.qk_norm:
        found.row_norm(2 * tokens * own.heads, width // own.heads, e, keeps_input=False)
        found.add(2 * tokens * width, 0, 0, e)
    found.add(tokens * width, 0, 0, e)  # the attention's output
    found.add(tokens * own.heads, 0, 0, _WIDE)  # the logsumexp
    if gated:
        # Multiplied by the gate of its history and added to the residual in one pass. Elsewhere
        # than on a GPU a row of the gate is made and kept for each event, and counted here too.
        found.add(tokens * width, 3 * e, 3 * e, 2 * e)
        found.add(tokens, 0, 0, 8)
    else:
        found.add(tokens * width, 3 * e, 0)
    found.add(tokens * width, 0, e)  # gradient of the residual, added in the norm's pass
    if own.ffn_hidden:
        found.row_norm(tokens, width, e)
        found.add(tokens * width, 0, e, e)  # the norm's output; again the residual's gradient
        found.add(tokens * own.ffn_hidden, 2 * e, 3 * e, e)
        found.add(tokens * width, 3 * e, 0)
    return found


def keeps_events(own: StreamSpec) -> bool:
    """Say whether the pooling of an interaction layer keeps the events that it reads.

    Args:
        own: the stream.

    Returns:
        True if keys and values, or DIN's products, are made of them; a mean keeps none.
    """
    return own.target_tokens > 0 or (own.summary_tokens > 0 and own.pooling != "mean")


def interaction_passes(
    spec: GemSpec, own: StreamSpec, sizes: Sizes, *, input_is_kept: bool
) -> Passes:
    """Elementwise work and kept bytes of an interaction layer's stream.

    Args:
        spec: the model.
        own: the stream.
        sizes: the batch.
        input_is_kept: whether the layer before keeps its output, which is the input of this one.

    Returns:
        bytes of a rank's batch.
    """
    e, tokens, width, examples = sizes.element_bytes, sizes.tokens, own.width, sizes.examples
    found = Passes()
    if own.ffn == "gdpa":
        # The first norm's output is the query and is added to what the attention reads, in the pass
        # of the second norm that also adds the residual. Backward one pass reads input, output and
        # gradient and goes through both norms.
        found.add(tokens * width, 6 * e, 5 * e, (2 if input_is_kept else 3) * e)
        context = examples * spec.summary_tokens
        found.add(context * width, 0, e, 3 * e)
        if own.qk_norm:
            found.row_norm(context * own.heads, width // own.heads, e, keeps_input=False)
        input_is_kept = False
    if keeps_events(own) and not input_is_kept:
        found.add(tokens * width, 0, 0, e)
    seeds = own.summary_tokens > 0 and own.pooling != "mean"
    queries = own.target_tokens > 0 and own.target_attention == "softmax"
    pools = int(seeds) + int(queries)
    found.add(pools * tokens * width, 0, 2 * e, 3 * e)
    if own.qk_norm:
        for _ in range(pools):
            found.row_norm(tokens * own.heads, width // own.heads, e, keeps_input=False)
    if seeds:
        _seed_passes(found, own, examples, e)
    elif own.summary_tokens:
        # The mean, which a product reads; its gradient is added to that of the events.
        found.add(examples * width, 0, 0, e if own.summary_tokens > 1 else 0)
        found.add(tokens * width, 0, 3 * e)
    if own.recent_tokens:
        taken = examples * own.recent_tokens
        found.add(taken * width, 4 * e, 2 * e)
        found.add(taken, 0, 0, _PLACE + 1)  # which events, and whether they are there
        found.add(tokens * width, 0, 4 * e)  # zeros around their gradient, added to the events'
    if own.target_tokens and not queries:
        _din_passes(found, own, sizes)
    rows = examples * own.tokens
    found.add(rows * width, 0, 0, e if width != spec.width else 0)  # what the lift reads
    found.row_norm(rows, spec.width, e)
    return found


def _seed_passes(found: Passes, own: StreamSpec, examples: int, e: int) -> None:
    """What becomes of the pooled seeds."""
    if own.pooling == "hsp":
        # Pooled seeds before and after their projection; their mixture.
        found.add(examples * own.seeds * own.width, 0, 2 * e, 2 * e)
        mixed = examples * own.kron_rank * own.summary_tokens * own.width
        found.add(mixed, 2 * e, 2 * e, e)
        found.add(examples * own.seeds * own.heads, 0, 0, _WIDE)
        return
    rows = examples * own.summary_tokens
    # Pooled seeds before their projection, the norm of what it gives, and the MLP's hidden values.
    found.add(rows * own.width, 0, 2 * e, 2 * e)
    found.row_norm(rows, own.width, e)
    found.add(rows * own.width, 5 * e, 4 * e, e)
    found.add(rows * own.heads, 0, 0, _WIDE)


def _din_passes(found: Passes, own: StreamSpec, sizes: Sizes) -> None:
    """Weights of DIN, which are made of event and candidate side by side."""
    e, tokens, width = sizes.element_bytes, sizes.tokens, own.width
    # Forward: the candidate of each event, difference and product, all four side by side, and
    # events times their weight. Backward: both factors of both products, and the sums of the four
    # gradients of events and candidates. Kept: the candidates, and what is side by side.
    found.add(tokens * width, (1 + 3 + 3 + 8 + 2) * e, (6 + 6 + 2 + 9 + 6 + 1) * e, 5 * e)
    found.add(tokens * own.target_hidden, 2 * e, 3 * e, e)
    found.add(tokens, 0, 0, e + _PLACE)  # the weight, and the row of each event


def summary_passes(spec: GemSpec, tokens: int, examples: int, e: int) -> Passes:
    """Elementwise work and kept bytes of the non-sequence summary.

    Args:
        spec: the model.
        tokens: tokens that enter the layer.
        examples: examples of a rank.
        e: bytes of an element.

    Returns:
        bytes of a rank's batch.
    """
    found, rows = Passes(), examples * spec.summary_tokens
    found.add(examples * tokens * spec.summary_tokens, 0, 2 * e, e)
    found.add(examples * tokens * spec.width, 0, 0, e)
    found.add(rows * spec.width, e, e, e)
    found.add(rows * spec.summary_hidden, 2 * e, 3 * e, e)
    found.add(rows * spec.width, e, e, e)
    return found


def event_passes(inputs: int, own: StreamSpec, tokens: int, e: int) -> Passes:
    """Elementwise work and kept bytes of a stream's tokens.

    Args:
        inputs: numbers that a token is made of.
        own: the stream.
        tokens: events of all examples.
        e: bytes of an element.

    Returns:
        bytes of a rank's batch.
    """
    found = Passes()
    narrow = _WIDE + e if e < _WIDE else 0
    found.add(tokens * inputs, 2 * _WIDE + narrow, 2 * _WIDE + narrow, e)
    if own.gap_buckets:
        found.add(tokens * own.gap_buckets, 8 * _WIDE, 0)
    if own.token_hidden:
        found.add(tokens * own.token_hidden, 2 * e, 3 * e, e)
    return found


def example_passes(columns: int, hidden: Sequence[int], examples: int, e: int) -> Passes:
    """Elementwise work and kept bytes of a stack of products over examples.

    Args:
        columns: numbers that come in, an example.
        hidden: widths of the layers between.
        examples: examples of a rank.
        e: bytes of an element.

    Returns:
        bytes of a rank's batch.
    """
    found = Passes()
    found.add(examples * columns, 2 * e, 2 * e, e)
    found.add(examples * sum(hidden), 2 * e, 3 * e, e)
    return found
