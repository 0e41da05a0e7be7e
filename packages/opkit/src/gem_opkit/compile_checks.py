"""Compiling Triton kernels for GPUs that are not there, and reading what the assembler says.

The interpreter shows that a kernel computes the right thing; it says nothing of whether the kernel
compiles for a given GPU. ``compile_kernels`` does that on any machine, down to the machine code,
in a fresh process, because a process in which the interpreter is on cannot compile.

Left out: kernels written in Gluon, whose source is built by a class of its own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gem_opkit.checks import run_fresh
from gem_opkit.errors import ConfigError, refusal


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One way in which a kernel is launched.

    Attributes:
        kernel: name of the ``@triton.jit`` function in its module.
        arguments: type of each run-time argument in Triton's words: ``"*bf16"``, ``"i32"``,
            ``"fp32"``.
        constants: value of each ``tl.constexpr`` argument.
        warps: warps of a program.
        stages: depth of software pipelining.
        aligned: run-time arguments that are multiples of 16; None for every pointer and every
            integer whose name begins with ``stride``, as with rows of 16 bytes.
    """

    kernel: str
    arguments: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    aligned: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What became of a variant on one architecture.

    Attributes:
        variant: what was compiled.
        capability: compute capability, 90 for Hopper, 100 for Blackwell.
        registers: of a thread.
        stack_bytes: local memory of a thread; above 0 where registers were spilled.
        shared_bytes: shared memory of a program.
        ptx: the assembly, to look for instructions in.
    """

    variant: KernelVariant
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str


_PROGRAM = """
import importlib, json, pathlib, re, subprocess, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module, variants, capabilities = json.loads({request!r})
module = importlib.import_module(module)
tools = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
done = []
for variant in variants:
    function = getattr(module, variant["kernel"])
    given, constants = variant["arguments"], variant["constants"]
    if set(given) | set(constants) != set(function.arg_names):
        odd = sorted(set(function.arg_names) ^ (set(given) | set(constants)))
        raise SystemExit(f"{{variant['kernel']}}: arguments missing or unknown: {{odd}}")
    signature = {{n: given.get(n, "constexpr") for n in function.arg_names}}
    aligned = variant["aligned"]
    if aligned is None:
        aligned = [n for n, t in given.items() if t[0] == "*" or n.startswith("stride")]
    attrs = {{
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(function.arg_names) if n in aligned
    }}
    for capability in capabilities:
        kernel = triton.compile(
            ASTSource(function, signature, constexprs=constants, attrs=attrs),
            target=GPUTarget("cuda", capability, 32),
            options={{"num_warps": variant["warps"], "num_stages": variant["stages"]}},
        )
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [tools / "cuobjdump", "-res-usage", file.name],
                capture_output=True, text=True, check=True,
            ).stdout
        numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\\d+)", usage))
        done.append(
            [int(numbers["REG"]), int(numbers["STACK"]) + int(numbers["LOCAL"]),
             kernel.metadata.shared, kernel.asm["ptx"]]
        )
print(json.dumps(done))
"""


def compile_kernels(
    module: str,
    variants: Sequence[KernelVariant],
    *,
    capabilities: Sequence[int] = (90, 100),
    timeout_s: float = 300.0,
) -> list[CompiledKernel]:
    """Compile kernels of a module to machine code, in a fresh process, without a GPU.

    Args:
        module: full name of the module that holds them.
        variants: how they are launched, at least one.
        capabilities: architectures, as compute capability times 10.
        timeout_s: seconds after which the process is stopped.

    Returns:
        one report for each variant and capability, variants outermost.

    Raises:
        CheckFailure: a kernel does not compile; the message holds Triton's.
        ConfigError: no variant.

    Cost: a second or so for each; Triton keeps what it compiled on disk.
    """
    if not variants:
        raise ConfigError(
            refusal("compile_kernels", "variants", must="not be empty", got=0, fix="give one")
        )
    request = json.dumps([module, [asdict(variant) for variant in variants], list(capabilities)])
    printed = run_fresh(_PROGRAM.format(request=request), timeout_s=timeout_s)
    reports = iter(json.loads(printed.splitlines()[-1]))
    return [
        CompiledKernel(variant, capability, *next(reports))
        for variant in variants
        for capability in capabilities
    ]
