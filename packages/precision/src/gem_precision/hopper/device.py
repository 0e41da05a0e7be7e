"""Device functions of the 8-bit formats on Hopper, for Gluon kernels; the bytes are ``device``'s.

Imports triton's Gluon, so kernels for Hopper import it and nothing else does. Several numbers are
rounded by one instruction, and stay in the registers in which they were loaded.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# All warps meet; Triton 3.8 has renamed it.
warps_meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def rounded_to_bf16(x):
    """Return the nearest bf16 numbers, in fp32."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2;"
        " shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
        "=r,=r,r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def bytes_of(x, E4M3: gl.constexpr):
    """Return elements of 8 bits, cut at the largest one."""
    if E4M3:
        codes = gl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [x],
            dtype=gl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        codes = gl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [x],
            dtype=gl.uint8,
            is_pure=True,
            pack=4,
        )
    return codes


@gluon.jit
def larger_magnitude(a, b):
    """Return the larger magnitude of two numbers, with some sign, or NaN if one is."""
    return gl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f32 $0, $1, $2;",
        "=f,f,f",
        [a, b],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def scale_code_of(largest, RCEIL: gl.constexpr, LARGEST_EXPONENT: gl.constexpr):
    """Return the E8M0 code of a block's scale, given its largest magnitude, of any sign."""
    bits = largest.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    up = bits
    if RCEIL:
        # What is above 1.75 times a power of two carries, but for one number at 2^-127.
        up = bits + gl.where(bits == ((LARGEST_EXPONENT << 23) | 0x600001), 0, 0x1FFFFF)
    code = gl.maximum((up >> 23) - LARGEST_EXPONENT, 0)
    return gl.where(bits >= 0x7F800000, 255, code)


@gluon.jit
def factor_of(code):
    """Return what brings a block into the range of its elements; NaN of code 255."""
    return gl.where(code == 255, 0x7FC00000, (254 - code) << 23).to(gl.float32, bitcast=True)
