import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import check_refuses
from gem_precision.costs import tensor_norms_cost
from gem_precision.kernels.tensor_norms.cases import CASES
from gem_precision.ops import tensor_norms

# Whole chunks of the kernels, a broken one, tensors smaller than a block, one without elements.
SHAPES = ((300, 511), (70_001,), (3, 1), (), (0, 4), (2, 65_536))


def tensors_of(shapes, dtype=torch.float32, device="cpu"):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]


def exact(tensors):
    """Of the same numbers in fp64, by a product instead of torch's norm."""
    flat = [t.detach().double().cpu().flatten() for t in tensors]
    return torch.stack([(x @ x).sqrt() for x in flat])


@pytest.mark.parametrize("case", [c for c in CASES if c.device == "cpu"], ids=lambda c: c.name)
def test_reference_gradients(case):
    """Norms are not differentiated; the reference gives those of the formula."""
    own = tensors_of(case.shapes, torch.bfloat16 if case.half else torch.float32)
    got = tensor_norms(own)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact(own), rtol=1e-6, atol=0.0)
    wide = tensor_norms([t.double() for t in own])
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide, exact(own), rtol=1e-14, atol=0.0)


def test_registration():
    own = tensors_of(((4, 3), (5,)))
    torch.library.opcheck(torch.ops.gem_precision.tensor_norms.default, (own, "reference"))
    with FlopCounterMode(display=False) as counter:
        tensor_norms(own)
    assert counter.get_total_flops() == tensor_norms_cost(elements=17).flops == 0
    assert tensor_norms_cost(elements=17).bytes == 34
    assert tensor_norms_cost(elements=17, element_bytes=4).bytes == 68


def test_compiles_whole():
    def norms(*tensors):
        return tensor_norms(list(tensors)).sum()

    whole = torch.compile(norms, fullgraph=True, backend="aot_eager")
    for shapes in (((4, 3), (5,)), ((9, 2), (5,))):
        own = tensors_of(shapes)
        assert torch.equal(norms(*own), whole(*own))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32)])
def test_interpreted_kernel(dtypes, monkeypatch):
    import gem_precision.kernels.tensor_norms.kernel as kernel

    monkeypatch.setattr(kernel, "_CHUNK", 256)
    monkeypatch.setattr(kernel, "_BLOCK", 128)
    monkeypatch.setattr(kernel, "_SUMMED", 4)
    kernel._chunks.cache_clear()
    shapes = ((40, 45), (7,), (0, 3), (), (2, 256))
    own = [t.to(dtypes[i % len(dtypes)]) for i, t in enumerate(tensors_of(shapes))]
    got = tensor_norms(own, impl="triton")
    kernel._chunks.cache_clear()
    torch.testing.assert_close(got.double(), exact(own), rtol=1e-6, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_on_gpu(dtype):
    own = tensors_of(SHAPES, dtype, "cuda")
    got = tensor_norms(own)
    torch.testing.assert_close(got.double().cpu(), exact(own), rtol=1e-6, atol=0.0)
    assert torch.equal(got, tensor_norms(own))


def test_ragged_edges():
    assert tensor_norms([torch.zeros(0, 4)]).tolist() == [0.0]
    assert tensor_norms([torch.zeros(()), torch.full((), -2.0)]).tolist() == [0.0, 2.0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_alone_equals_in_batch(device):
    own = tensors_of(SHAPES, torch.bfloat16, device)
    alone = torch.cat([tensor_norms([t]) for t in own])
    assert torch.equal(tensor_norms(own), alone)


def test_refuses():
    own = tensors_of(((4, 3), (5,)))
    check_refuses(
        [
            (lambda: tensor_norms([]), ShapeError, "tensors must hold at least one"),
            (
                lambda: tensor_norms([own[0].int()]),
                DtypeError,
                r"tensors\[0\] must be floating point",
            ),
            (
                lambda: tensor_norms([own[1], own[0].t()]),
                UnsupportedError,
                r"tensors\[1\] must be contiguous",
            ),
            (
                lambda: tensor_norms([own[0].clone().requires_grad_()]),
                UnsupportedError,
                r"tensors\[0\] must require no gradient",
            ),
            (
                lambda: tensor_norms([own[0].double()], impl="triton"),
                UnsupportedError,
                "must be narrower than float64",
            ),
            (lambda: tensor_norms(own, impl="fast"), UnsupportedError, "impl must be one of"),
        ]
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_not_finite_is_seen_in_its_tensor_alone(device):
    own = tensors_of(SHAPES, torch.bfloat16, device)
    own[0][299, 510] = float("inf")
    own[1][70_000] = float("nan")
    own[5][1, 0] = 1e25  # its square is no number of fp32
    found = tensor_norms(own).cpu()
    assert torch.isfinite(found).tolist() == [False, False, True, True, True, False]


@pytest.mark.gpu
@pytest.mark.memcheck
def test_right_at_odd_addresses():
    buffer = torch.randn(70_100, device="cuda", dtype=torch.bfloat16)
    own = [buffer[1:70_002], buffer[70_003:70_010]]
    torch.testing.assert_close(tensor_norms(own).double().cpu(), exact(own), rtol=1e-6, atol=0.0)


@pytest.mark.interpreter
def test_kernels_compile_to_wide_loads_without_spills():
    names = ("table_ptr", "chunks_ptr")
    pointers = {**dict.fromkeys(names, "*i64"), "parts_ptr": "*fp32"}
    variants = [
        KernelVariant(
            "_squares_kernel",
            pointers,
            {"DTYPE": "bf16", "ALIGNED": True, "CHUNK": 65_536, "BLOCK": 4096},
            warps=8,
            aligned=list(pointers),
        )
    ]
    for done in compile_kernels("gem_precision.kernels.tensor_norms.kernel", variants):
        assert done.stack_bytes == 0
        assert done.ptx.count("ld.global.v4.b32") >= 2
