"""Which number formats a device computes in by itself, which it imitates, and which it lacks.

A format is *native* where the device multiplies matrices in it and torch has the way there,
*emulated* where torch stores it or imitates it and computes in a wider one (right numbers, no
speed), and *absent* where neither exists. This is about the device; whether a recipe may ask for
the format is another column. A product of two e5m2 matrices exists nowhere: cuBLAS takes e5m2 on
one side, and torch refuses it on both.

Sources, of the rules by compute capability: NVIDIA's CUDA C++ Programming Guide, arithmetic
instructions and tensor cores by compute capability (fp16 7.0, bf16 and tf32 8.0, fp8 8.9), and its
PTX ISA, ``mma`` and ``tcgen05.mma ... block_scale`` (MXFP8 10.0); cuBLAS 12.9 release notes (1x128
and 128x128 block scales on 9.0, block scales of 32 on 10.0 since 12.8); PyTorch's
``torch.nn.functional.scaled_mm``, which takes block scales of 128 on 9.0 alone; its issue 198126 on
block scales of 32 on 12.x, in one layout of the factors, as cuBLAS 13 says. On 9.0 Triton's
``dot_scaled`` compiles to bf16 products, seen in its PTX. Of CPUs: the flags of the processor that
oneDNN asks for (AVX512_BF16, AMX_BF16, AVX512_FP16, AMX_FP16); of Arm, bf16 and fp16_arith as
``torch.cpu.get_capabilities`` names them, which Linux calls bf16 and asimdhp.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

State = Literal["native", "emulated", "absent", "unknown"]

# format -> what it is.
FORMATS = {
    "fp32": "32 bits",
    "tf32": "fp32 in memory, 10 bits of mantissa in products",
    "bf16": "8 bits of exponent, 7 of mantissa",
    "fp16": "5 bits of exponent, 10 of mantissa",
    "fp8_e4m3": "one scale for a tensor or a row",
    "fp8_e5m2": "one scale for a tensor or a row; the other factor is e4m3",
    "fp8_block": "e4m3, a float32 scale for every 128 numbers",
    "mxfp8": "e4m3, a scale that is a power of two for every 32 numbers",
}
# format -> key and value in a recipe's [precision]; the others have none.
_IN_A_RECIPE = {
    "fp32": ("default", "fp32"),
    "bf16": ("default", "bf16_autocast"),
    "fp8_block": ("recipe", "fp8_block"),
    "mxfp8": ("recipe", "mxfp8_rceil"),
}


@dataclass(frozen=True, slots=True)
class FormatState:
    """What one device does with one format.

    Attributes:
        state: native, emulated, absent or unknown.
        why: the reason.
    """

    state: State
    why: str


@dataclass(frozen=True, slots=True)
class FormatFinding:
    """One number format.

    Attributes:
        about: what it is.
        recipe: what a recipe's ``[precision]`` calls it; None where it has no name for it.
        built: whether such a recipe runs.
        devices: label of a device -> what it does with the format.
    """

    about: str
    recipe: str | None
    built: bool
    devices: dict[str, FormatState] = field(default_factory=dict[str, FormatState])


def cuda_formats(
    capability: tuple[int, int], cuda: tuple[int, int], torch_version: tuple[int, int]
) -> dict[str, FormatState]:
    """The formats of a GPU.

    Args:
        capability: compute capability.
        cuda: version of CUDA that torch was built with.
        torch_version: major and minor version of torch.

    Returns:
        format -> what the GPU does with it.
    """
    name = f"compute capability {capability[0]}.{capability[1]}"
    widened = "products are computed in a wider format"

    def since(least: tuple[int, int], otherwise: State = "emulated") -> FormatState:
        if capability >= least:
            return FormatState("native", f"tensor cores since {least[0]}.{least[1]}; {name}")
        lacking = f"needs compute capability {least[0]}.{least[1]}, this is {_dotted(capability)}"
        return FormatState(otherwise, f"{lacking}; {widened}" if otherwise != "absent" else lacking)

    found = {
        "fp32": FormatState("native", "every GPU"),
        "tf32": since((8, 0), "absent"),
        "bf16": since((8, 0)),
        "fp16": since((7, 0)),
        "fp8_e4m3": since((8, 9)),
        "fp8_e5m2": since((8, 9)),
    }
    imitated = "the numbers can be had by dequantising"
    if capability != (9, 0):
        only = f"needs compute capability 9.0, this is {_dotted(capability)}; {imitated}"
        found["fp8_block"] = FormatState("emulated", only)
    elif cuda < (12, 9) or torch_version < (2, 10):
        these = f"these are {_dotted(cuda)} and {_dotted(torch_version)}"
        found["fp8_block"] = FormatState("emulated", f"needs CUDA 12.9 and torch 2.10, {these}")
    else:
        found["fp8_block"] = FormatState("native", f"scaled_mm with block scales; {name}")
    if capability[0] < 10:
        found["mxfp8"] = FormatState(
            "emulated",
            f"needs compute capability 10.0, this is {_dotted(capability)}; {imitated}",
        )
    elif capability[0] >= 12 and cuda >= (13, 0):
        layout = "in one layout of the factors (TN), which not every backward product has"
        found["mxfp8"] = FormatState(
            "native", f"scaled_mm with block scales of 32, {layout}; {name}"
        )
    elif capability[0] >= 12:
        found["mxfp8"] = FormatState("unknown", f"known from CUDA 13.0 on, this is {_dotted(cuda)}")
    elif cuda < (12, 8):
        found["mxfp8"] = FormatState("emulated", f"needs CUDA 12.8, this is {_dotted(cuda)}")
    else:
        found["mxfp8"] = FormatState("native", f"scaled_mm with block scales of 32; {name}")
    return found


def cpu_formats(flags: Iterable[str] | None) -> dict[str, FormatState]:
    """The formats of a CPU.

    Args:
        flags: features of the processor, in lower case; None where they are not known.

    Returns:
        format -> what the CPU does with it.
    """
    known = None if flags is None else {flag.lower() for flag in flags}
    widened = "torch computes in fp32 and rounds"

    def with_one_of(*wanted: str) -> FormatState:
        if known is None:
            return FormatState("unknown", "the processor does not say what it has")
        for flag in wanted:
            if flag in known:
                return FormatState("native", f"the processor has {flag}")
        return FormatState("emulated", f"the processor has none of {', '.join(wanted)}; {widened}")

    stored = FormatState("emulated", "torch stores it; products are computed in fp32")
    return {
        "fp32": FormatState("native", "every CPU"),
        "tf32": FormatState("absent", "a format of GPUs"),
        "bf16": with_one_of("amx_bf16", "avx512_bf16", "bf16"),
        "fp16": with_one_of("amx_fp16", "avx512_fp16", "fp16_arith", "asimdhp"),
        "fp8_e4m3": stored,
        "fp8_e5m2": stored,
        "fp8_block": stored,
        "mxfp8": stored,
    }


def format_findings(devices: dict[str, dict[str, FormatState]]) -> dict[str, FormatFinding]:
    """The formats of all devices, and whether a recipe may ask for them.

    Args:
        devices: label -> what `cpu_formats` or `cuda_formats` says.

    Returns:
        format -> what is known of it.
    """
    runs = _recipe_runs()
    return {
        name: FormatFinding(
            about=about,
            recipe=_IN_A_RECIPE[name][1] if name in _IN_A_RECIPE else None,
            built=name in _IN_A_RECIPE and runs(*_IN_A_RECIPE[name]),
            devices={label: states[name] for label, states in devices.items()},
        )
        for name, about in FORMATS.items()
    }


def _recipe_runs() -> Callable[[str, str], bool]:
    """Asks the package that applies recipes; without it no format runs."""
    try:
        from gem_opkit.errors import UnsupportedError
        from gem_precision.contract import PrecisionRecipe
        from gem_precision.layers import apply_recipe
    except Exception:  # noqa: BLE001 - an installation can be broken in any way
        return lambda key, name: False

    def runs(key: str, name: str) -> bool:
        try:
            apply_recipe(PrecisionRecipe.model_validate({key: name}), "cpu")
        except (UnsupportedError, ValueError):
            return False
        return True

    return runs


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
