"""The activations of generalized attention on the device: one source for Triton and for Gluon.

A function of ``triton.jit`` that uses elementwise operations alone may be called from Gluon too,
where it keeps the layout of its operand. The names and formulas are those of
``gem_attention.activations``; x below is scale · score.

FAST is for products that are rounded to bf16 or fp16 next. It takes tanh from the special-function
unit (one instruction), shares it between value and slope, and folds the scale into constants: silu
has 2 instructions a score besides the tanh and the conversion, fast_gelu and gelu 5, and
``folded_value`` one less. Without FAST the exponential and the error function are those of Triton,
exact to a few units in the last place of float32; the interpreter, which has no assembly, runs
these.

gelu in FAST: erf(x/√2) = tanh(x (a + b x²)), fitted here to an error of 3.4·10⁻⁴ in gelu and
6.7·10⁻⁴ in its slope (the constants of fast_gelu: 4.7·10⁻⁴ and 8.7·10⁻⁴). A third constant would
make it 3·10⁻⁵, but needs a limit to x² besides, and with the two instructions the forward took an
eighth longer.

A score of NaN stays NaN. The slope of relu at 0 is 0.
"""

import triton
import triton.language as tl

# tanh form of gelu: √(2/π) and 0.044715 √(2/π).
_TANH_1 = tl.constexpr(0.7978845608028654)
_TANH_3 = tl.constexpr(0.035677408136300125)
# The fit of erf(x/√2) by a tanh.
_ERF_1 = tl.constexpr(0.79991365)
_ERF_3 = tl.constexpr(0.03497315)
_TAYLOR_2 = tl.constexpr(0.3989422804)
_TAYLOR_4 = tl.constexpr(-0.0664903801)
_TAYLOR_6 = tl.constexpr(0.0099735570)
_LEAK = tl.constexpr(0.01)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # 1/√(2π)


# Triton 3.6 takes no element of a tuple for a constant, hence functions that return each alone, and
# they may call no other.
@triton.constexpr_function
def names(activations):
    """Return how many distinct names there are."""
    return len(set(activations.split(",")))


@triton.constexpr_function
def name(activations, which):
    """Return one of the distinct names."""
    return list(dict.fromkeys(activations.split(",")))[which]


@triton.constexpr_function
def _heads(activations, name):
    """Return how many heads have a name."""
    return activations.split(",").count(name)


@triton.constexpr_function
def _head(activations, name, which):
    """Return one of the heads that have a name."""
    return [h for h, other in enumerate(activations.split(",")) if other == name][which]


@triton.jit
def _has(head, ACTIVATIONS: tl.constexpr, NAME: tl.constexpr):
    """Whether a head has a name."""
    found = head == _head(ACTIVATIONS, NAME, 0)
    for i in tl.static_range(1, _heads(ACTIVATIONS, NAME)):
        found = found | (head == _head(ACTIVATIONS, NAME, i))
    return found


@triton.jit
def _unit_tanh(x):
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _rectified(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _unit_argument(score, scale, NAME: tl.constexpr):
    """Return what the tanh in gelu is taken of, and its derivative by x."""
    C1: tl.constexpr = _TANH_1 if NAME == "fast_gelu" else _ERF_1
    C3: tl.constexpr = _TANH_3 if NAME == "fast_gelu" else _ERF_3
    square = scale * scale
    s2 = score * score
    return score * (s2 * (C3 * square * scale) + C1 * scale), s2 * (3.0 * C3 * square) + C1


@triton.jit
def _fast_value(score, scale, NAME: tl.constexpr):
    half = score * (0.5 * scale)
    if NAME == "silu":
        return half * _unit_tanh(half) + half
    g, _ = _unit_argument(score, scale, NAME)
    return half * _unit_tanh(g) + half


@triton.jit
def _fast_value_and_slope(score, scale, NAME: tl.constexpr):
    half = score * (0.5 * scale)
    if NAME == "silu":
        t = _unit_tanh(half)
        value = half * t + half
        share = 0.5 * t + 0.5
        return value, value * (0.5 - 0.5 * t) + share
    g, slope = _unit_argument(score, scale, NAME)
    t = _unit_tanh(g)
    value = half * t + half
    # x/2 (1 - t²) g' = value (1 - t) g', where 1 - t is 0 before g' grows without bound.
    return value, value * (slope - t * slope) + (0.5 * t + 0.5)


@triton.jit
def folded_value(score, scale, NAME: tl.constexpr, FAST: tl.constexpr):
    """Return f(scale · score) / ``fold(scale)``, an instruction cheaper; ``scale`` not below 0."""
    if FAST and (NAME == "silu" or NAME == "fast_gelu" or NAME == "gelu"):
        if NAME == "silu":
            return score * _unit_tanh(score * (0.5 * scale)) + score
        g, _ = _unit_argument(score, scale, NAME)
        return score * _unit_tanh(g) + score
    if NAME == "relu":
        return _rectified(score)
    if NAME == "leaky_relu":
        return tl.where(score > 0, score, score * _LEAK)
    # Not the identity: the assembler makes products wait for each other that have nothing between.
    return _value(score, scale, NAME, FAST)


@triton.jit
def fold(scale, NAME: tl.constexpr, FAST: tl.constexpr):
    """Return what ``folded_value`` leaves to the sum over keys."""
    if FAST and (NAME == "silu" or NAME == "fast_gelu" or NAME == "gelu"):
        return 0.5 * scale
    if NAME == "relu" or NAME == "leaky_relu":
        return scale
    return scale * 0.0 + 1.0


@triton.jit
def _value(score, scale, NAME: tl.constexpr, FAST: tl.constexpr):
    if FAST and (NAME == "silu" or NAME == "fast_gelu" or NAME == "gelu"):
        return _fast_value(score, scale, NAME)
    x = score * scale
    if NAME == "identity":
        return x
    if NAME == "relu":
        return _rectified(x)
    if NAME == "relu_squared":
        positive = _rectified(x)
        return positive * positive
    if NAME == "leaky_relu":
        return tl.where(x > 0, x, x * _LEAK)
    if NAME == "silu":
        return x * _sigmoid(x)
    if NAME == "hard_swish":
        return x * tl.minimum(tl.maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0)
    if NAME == "taylor_gelu":
        x2 = x * x
        return x * (x * (x2 * (x2 * _TAYLOR_6 + _TAYLOR_4) + _TAYLOR_2) + 0.5)
    if NAME == "fast_gelu":
        return x * _sigmoid(2.0 * (x * (x * x * _TANH_3 + _TANH_1)))
    return 0.5 * x * (1.0 + tl.erf(x * _ROOT_HALF))


@triton.jit
def _value_and_slope(score, scale, NAME: tl.constexpr, FAST: tl.constexpr):
    if FAST and (NAME == "silu" or NAME == "fast_gelu" or NAME == "gelu"):
        return _fast_value_and_slope(score, scale, NAME)
    x = score * scale
    if NAME == "identity":
        return x, tl.where(x <= 0, 1.0, 1.0)
    if NAME == "relu":
        return _rectified(x), tl.where(x <= 0, 0.0, 1.0)
    if NAME == "relu_squared":
        positive = _rectified(x)
        return positive * positive, 2.0 * positive
    if NAME == "leaky_relu":
        slope = tl.where(x > 0, 1.0, _LEAK)
        return x * slope, slope
    if NAME == "silu":
        share = _sigmoid(x)
        value = x * share
        return value, share + value * (1.0 - share)
    if NAME == "hard_swish":
        share = tl.minimum(tl.maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0)
        inner = x * (1.0 / 3.0) + 0.5
        return x * share, tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, 1.0, inner))
    if NAME == "taylor_gelu":
        x2 = x * x
        value = x * (x * (x2 * (x2 * _TAYLOR_6 + _TAYLOR_4) + _TAYLOR_2) + 0.5)
        odd = x2 * (x2 * (6.0 * _TAYLOR_6) + 4.0 * _TAYLOR_4) + 2.0 * _TAYLOR_2
        return value, x * odd + 0.5
    if NAME == "fast_gelu":
        x2 = x * x
        share = _sigmoid(2.0 * (x * (x2 * _TANH_3 + _TANH_1)))
        inner = 2.0 * (x2 * (3.0 * _TANH_3) + _TANH_1)
        # In this order: share (1 - share) is 0 where the rest grows without bound.
        return x * share, share + x * ((share * (1.0 - share)) * inner)
    share = 0.5 * (1.0 + tl.erf(x * _ROOT_HALF))
    return x * share, share + x * (tl.exp(-0.5 * x * x) * _DENSITY)


@triton.jit
def activated(score, scale, head, ACTIVATIONS: tl.constexpr, FAST: tl.constexpr):
    """Return f(scale · score) in float32.

    ``ACTIVATIONS`` is one name, or one a query head joined by commas; then ``head``, the query
    head, is looked up, one branch for all elements.
    """
    p = score
    if names(ACTIVATIONS) == 1:
        p = _value(score, scale, name(ACTIVATIONS, 0), FAST)
    else:
        for i in tl.static_range(names(ACTIVATIONS)):
            if _has(head, ACTIVATIONS, name(ACTIVATIONS, i)):
                p = _value(score, scale, name(ACTIVATIONS, i), FAST)
    return p


@triton.jit
def activated_with_slope(score, scale, head, ACTIVATIONS: tl.constexpr, FAST: tl.constexpr):
    """Return f(x) and f'(x) at x = scale · score; arguments as ``activated``."""
    p = score
    slope = score
    if names(ACTIVATIONS) == 1:
        p, slope = _value_and_slope(score, scale, name(ACTIVATIONS, 0), FAST)
    else:
        for i in tl.static_range(names(ACTIVATIONS)):
            if _has(head, ACTIVATIONS, name(ACTIVATIONS, i)):
                p, slope = _value_and_slope(score, scale, name(ACTIVATIONS, i), FAST)
    return p, slope
