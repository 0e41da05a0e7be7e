"""What the experts of a layer do with memory: bytes moved, and copies kept for the backward pass.

Counted as in `gem.planning.operators`; the same test holds what is kept to autograd's own hooks.
"""

from gem.model.expert_spec import ExpertKind, ExpertsSpec
from gem.model.flops import PassFlops, experts_flops
from gem.model.spec import GemSpec
from gem.model.structure import pair_count
from gem.planning.operators import Passes

_WIDE = 4  # bytes of fp32


def expert_flops(spec: GemSpec, kind: ExpertKind, tokens: int, examples: int) -> PassFlops:
    """FLOPs of one expert: those of a mixture of one that reads all of its tokens.

    Args:
        spec: the model.
        kind: of the expert.
        tokens: tokens that it reads.
        examples: examples of a rank.

    Returns:
        FLOPs forward and backward.
    """
    alone = {"count": 1, "kinds": (kind,), "partition": "all", "residual": False}
    own = spec.experts.model_copy(update=alone)
    return experts_flops(own, spec.width, examples, tokens=tokens, summary_tokens=0)


def expert_passes(
    spec: ExpertsSpec, kind: ExpertKind, width: int, tokens: int, examples: int, e: int
) -> Passes:
    """Elementwise work and kept bytes of one expert.

    Args:
        spec: sizes.
        kind: of the expert.
        width: width of a token.
        tokens: tokens that it reads.
        examples: examples of a rank.
        e: bytes of an element.

    Returns:
        bytes of a rank's batch.
    """
    found = Passes()
    found.add(examples * tokens * width, 2 * e, 2 * e, e)
    if kind != "wukong":
        found.add(examples * spec.tokens * width, 3 * e, 0)  # added to the others
    if kind in ("cross", "attention"):
        # The compression is a weight that every example reads; what is kept is as below.
        found.add(examples * tokens * spec.tokens, 0, 2 * e, e)
    if kind in ("dot", "mlp"):
        found.add(examples * sum(spec.mlp_widths), 2 * e, 3 * e, e)
    if kind == "wukong":
        _wukong(found, spec, width, tokens, examples, e)
    elif kind == "cross":
        # Each layer: what its product gives, times the first tokens, and the sum, which is kept for
        # the next product. Backward: both factors, and the sums of two gradients of the first and
        # of the layer's tokens.
        found.add(examples * tokens * width * spec.cross_layers, 6 * e, 12 * e, 2 * e)
    elif kind == "dot":
        _dot(found, width, tokens, examples, e)
    elif kind == "attention":
        _attention(found, spec, width, tokens, examples, e)
    return found


def _wukong(
    found: Passes, spec: ExpertsSpec, width: int, tokens: int, examples: int, e: int
) -> None:
    rank = spec.rank
    found.add(examples * rank * width, 0, e, e)
    # Y and the compression are weights that every example reads; their gradients are summed. What
    # is kept of them is what a CPU casts for each example.
    found.add(examples * tokens * (rank + spec.linear_tokens), 0, 2 * e, e)
    found.row_norm(examples, tokens * rank, e)
    found.add(examples * tokens * rank, 0, 0, e)
    found.add(examples * sum(spec.mlp_widths), 2 * e, 3 * e, e)
    found.add(examples * (spec.fm_tokens + spec.linear_tokens) * width, 4 * e, 4 * e)


def _dot(found: Passes, width: int, tokens: int, examples: int, e: int) -> None:
    pairs = pair_count(tokens)
    # All products written; half of them picked, and their gradients put back among zeros.
    found.add(examples * tokens * tokens, e, 2 * e)
    found.add(examples * pairs, 2 * e, 2 * e, e)
    if pairs > 1:
        found.row_norm(examples, pairs, e)
    found.add(examples * tokens * width, 0, 3 * e)  # gradients of both factors, added


def _attention(
    found: Passes, spec: ExpertsSpec, width: int, tokens: int, examples: int, e: int
) -> None:
    rows, narrow = examples * tokens, e < _WIDE
    found.row_norm(rows, width, e, keeps_input=False)
    # Kept: the norm's output; queries, keys and values sorted by head; what they read, sorted back;
    # and the sum with the tokens, which the compression reads.
    found.add(rows * width, (6 + 2 + 3) * e, (6 + 2 + 3) * e, 6 * e)
    # Scores written, scaled and read by the softmax, which is in fp32 and then cast.
    cast = 2 * (_WIDE + e) if narrow else 0
    scores = rows * tokens * spec.attention_heads
    found.add(
        scores, 4 * e + 2 * _WIDE + cast, 4 * e + 3 * _WIDE + cast, _WIDE + (e if narrow else 0)
    )


def mixture_passes(spec: GemSpec, tokens: int, examples: int, e: int) -> Passes:
    """Elementwise work and kept bytes around a layer's experts: shortcut, sum and norm.

    Args:
        spec: the model.
        tokens: tokens that enter the layer.
        examples: examples of a rank.
        e: bytes of an element.

    Returns:
        bytes of a rank's batch.
    """
    found = Passes()
    outputs = spec.experts.fm_tokens + spec.experts.linear_tokens
    found.add(examples * outputs * spec.width, 3 * e, 3 * e)
    if spec.experts.residual and tokens != outputs:
        found.add(examples * tokens * outputs, 0, 2 * e, e)
    found.row_norm(examples * outputs, spec.width, e)
    return found
