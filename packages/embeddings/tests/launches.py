"""What kernels are asked to run, recorded in the interpreter, as variants to compile."""

from collections import defaultdict
from contextlib import contextmanager

import torch

from gem_opkit.compile_checks import KernelVariant

# Numbers that change with every batch: the kernels ask Triton not to look at their values.
_UNSEEN = {"ids", "batch", "features", "seed", "step"}
_TYPES = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
}


@contextmanager
def recorded_launches():
    """Collect the variants of all kernels that the interpreter is asked to run, by module."""
    from triton.runtime.interpreter import GridExecutor

    variants = defaultdict(dict)
    original = GridExecutor.__call__

    def record(self, *args, **kwargs):
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        arguments, constants, aligned = {}, {}, []
        for name in self.arg_names:
            value = given[name]
            if isinstance(value, torch.Tensor):
                arguments[name] = _TYPES[value.dtype]
                aligned.append(name)
            elif name.isupper():
                constants[name] = value
            elif isinstance(value, float):
                arguments[name] = "fp32"
            else:
                assert name in _UNSEEN, name
                arguments[name] = "i64" if name == "seed" else "i32"
        variant = KernelVariant(
            self.fn.__name__, arguments, constants,
            warps=given.get("num_warps", 4), aligned=tuple(aligned),
        )  # fmt: skip
        variants[self.fn.__module__][str(variant)] = variant
        return original(self, *args, **kwargs)

    GridExecutor.__call__ = record
    try:
        yield variants
    finally:
        GridExecutor.__call__ = original
