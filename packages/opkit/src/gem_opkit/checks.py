"""Fixed tests 1, 2, 3 and 8 of every operator, and the checks of whole packages.

1 ``check_reference_gradients``, 2 ``check_registration``, 3 ``check_compiles_whole``,
8 ``check_refuses``. Tests 4 and 5 are in ``kernel_checks``, 6 and 7 in ``ragged``; test files
import all of them from ``gem_opkit.testing``.

torch's FLOP counter and Dynamo import triton, and triton's own functions read TRITON_INTERPRET
when they are imported. So they are imported inside the checks, after the plugin has set it.
"""

import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gem_opkit.budget import (
    CheckFailure,
    check_equal_up_to_rounding,
    check_runs_equal,
    differentiable,
    fresh,
    run_with_gradients,
    tensors_in,
    upstream_like,
)
from gem_opkit.contract import contract_json
from gem_opkit.cost import Cost, op_packet
from gem_opkit.errors import GemError


def check_reference_gradients(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    reference: Callable[..., Any] | None = None,
) -> None:
    """Fixed test 1: the written backward against numeric derivatives, in fp64.

    Also feeds gradients of awkward memory layout: expanded (what ``out.sum().backward()`` sends)
    and transposed; and sends tangents in, which must come out again or be refused: a custom
    operator drops them by itself.

    Args:
        fn: the public operator, so that the derivative goes through the registered backward.
        inputs: small positional arguments; floats are cast to fp64; mark what is differentiable
            with ``requires_grad=True``.
        reference: ``<op>_reference`` in plain torch; where given, outputs and gradients must
            also equal its autograd to fp64 rounding, which is far tighter than a numeric
            derivative.

    Raises:
        CheckFailure: a derivative, or the result for some layout of the gradient, is wrong; or
            tangents are dropped without a word.
        ConfigError: no input is differentiable.

    Example:
        ``check_reference_gradients(jagged_mean, (values_TD, layout), reference=oracle)``
    """
    differentiable(inputs, "check_reference_gradients")
    doubles = fresh(inputs, dtype=torch.float64)

    def tensors_only(*args: Any) -> tuple[Tensor, ...]:
        return tuple(out for out in tensors_in(fn(*args)) if out.requires_grad)

    try:
        passed = torch.autograd.gradcheck(tensors_only, doubles, raise_exception=True)
    except (RuntimeError, ValueError) as error:
        raise CheckFailure(f"numeric derivative: {error}") from error
    if not passed:
        raise CheckFailure("numeric derivative: gradcheck did not pass")
    _check_upstream_layouts(fn, inputs)
    _check_tangents(fn, inputs)
    if reference is not None:
        check_runs_equal(
            run_with_gradients(fn, fresh(inputs, dtype=torch.float64)),
            run_with_gradients(reference, fresh(inputs, dtype=torch.float64)),
            what="against the autograd of the reference: ",
        )


def _check_upstream_layouts(fn: Callable[..., Any], inputs: Sequence[Any]) -> None:
    doubles = fresh(inputs, dtype=torch.float64)
    leaves = differentiable(doubles, "check_reference_gradients")
    roots = [out for out in tensors_in(fn(*doubles)) if out.requires_grad]
    plain = [upstream_like(root, seed=index) for index, root in enumerate(roots)]
    turned = [value.transpose(0, -1).contiguous().transpose(0, -1) for value in plain]
    ones = [torch.ones_like(root) for root in roots]
    expanded = [root.new_ones(()).expand(root.shape) for root in roots]
    for name, awkward, contiguous in (
        ("transposed", turned, plain),
        ("expanded", expanded, ones),
    ):
        results = [
            torch.autograd.grad(roots, leaves, upstream, retain_graph=True, allow_unused=True)
            for upstream in (awkward, contiguous)
        ]
        for index, (a, b) in enumerate(zip(*results, strict=True)):
            if a is not None and b is not None:
                what = f"gradient of leaf {index} for a {name} upstream gradient"
                check_equal_up_to_rounding(a, b, what=what, noise_scale=4.0)


def _check_tangents(fn: Callable[..., Any], inputs: Sequence[Any]) -> None:
    doubles = fresh(inputs, dtype=torch.float64)
    leaves = differentiable(doubles, "check_reference_gradients")
    forward_mode = torch.autograd.forward_ad
    for leaf in leaves:
        if not leaf.numel():
            continue
        with forward_mode.dual_level():
            dual = forward_mode.make_dual(leaf.detach(), torch.ones_like(leaf))
            given = [dual if x is leaf else _undifferentiated(x) for x in doubles]
            try:
                outputs = list(tensors_in(fn(*given)))
            except NotImplementedError:  # ours, or torch's of an autograd.Function
                continue
            if all(forward_mode.unpack_dual(out).tangent is None for out in outputs):
                raise CheckFailure(
                    "forward mode: the tangent of an input is dropped in silence; refuse it with "
                    "gem_opkit.derivatives.check_autograd"
                )


def _undifferentiated(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def check_registration(
    op: Any,
    args: Sequence[Any],
    *,
    cost: Cost | int,
    backward_cost: Cost | int | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Fixed test 2: schema, fake kernel, autograd and FLOP formula of a custom op.

    Runs all four utilities of ``torch.library.opcheck``; then torch's FLOP counter must find
    exactly the FLOPs of ``cost.py``, on real and on fake tensors.

    Args:
        op: the custom op (``torch.ops.gem_x.y`` or what ``custom_op`` returned), not the public
            function.
        args: positional arguments of the op; let some require a gradient.
        cost: what ``cost.py`` says of this call.
        backward_cost: what it says of the backward of this call; None where the op has none.
        kwargs: keyword arguments of the op.

    Raises:
        CheckFailure: a utility fails, no formula is registered, or the counts differ.

    Example:
        ``check_registration(torch.ops.gem_x.y, args, cost=cost(8, 4), backward_cost=...)``
    """
    from torch.utils.flop_counter import flop_registry

    kwargs = dict(kwargs or {})
    packet = op_packet(op)
    if packet not in flop_registry:
        raise CheckFailure(f"{packet}: no FLOP formula; call gem_opkit.cost.register_flops")
    overload = packet.default
    try:
        torch.library.opcheck(overload, tuple(args), kwargs, raise_exception=True)
    except Exception as error:
        raise CheckFailure(f"{packet}: opcheck: {error}") from error

    expected = _flops(cost)
    _, counted = _counted(lambda: packet(*fresh(args), **kwargs))
    if counted != expected:
        raise CheckFailure(f"{packet}: FLOP formula gives {counted}, cost.py {expected}")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        try:
            _, on_fakes = _counted(lambda: packet(*fakes, **kwargs))
        except RuntimeError as error:
            raise CheckFailure(
                f"{packet}: FLOP formula or fake kernel fails on fake tensors, "
                f"take lengths from host ints: {error!r}"
            ) from error
    if on_fakes != expected:
        raise CheckFailure(f"{packet}: on fake tensors {on_fakes} FLOPs, cost.py {expected}")

    if backward_cost is None:
        return
    real = fresh(args)
    leaves = differentiable(real, "check_registration")
    roots = [out for out in tensors_in(packet(*real, **kwargs)) if out.requires_grad]
    upstream = [upstream_like(root, seed=index) for index, root in enumerate(roots)]
    _, counted = _counted(lambda: torch.autograd.grad(roots, leaves, upstream, allow_unused=True))
    if counted != _flops(backward_cost):
        raise CheckFailure(
            f"{packet}: backward counts {counted} FLOPs, cost.py {_flops(backward_cost)}"
        )


def _flops(cost: Cost | int) -> int:
    return cost.flops if isinstance(cost, Cost) else cost


def _counted(call: Callable[[], Any]) -> tuple[Any, int]:
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        result = call()
    return result, counter.get_total_flops()


def check_compiles_whole(
    fn: Callable[..., Any], input_sets: Sequence[Sequence[Any]], *, max_graphs: int = 2
) -> None:
    """Fixed test 3: one full graph over several lengths, equal to eager, forward and backward.

    Compiles with ``fullgraph=True, dynamic=True`` and the backend ``aot_eager`` (no C++ compile),
    counts the graphs, and compares outputs and gradients with eager up to rounding.

    Args:
        fn: the public operator, or a module (its parameters' gradients are compared too).
        input_sets: positional arguments of several calls that differ in lengths, at least two.
            Sizes 0 and 1 are constants of a graph and cost one each; leave them to
            ``check_ragged_edges``.
        max_graphs: most graphs over all sets.

    Raises:
        CheckFailure: a graph break, too many graphs, or a different result.

    Example:
        ``check_compiles_whole(jagged_mean, [inputs((3, 5)), inputs((2, 7)), inputs((4, 9))])``
    """
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import TorchDynamoException

    if len(input_sets) < 2:
        raise CheckFailure("check_compiles_whole needs input sets of at least two lengths")
    eager = [run_with_gradients(fn, fresh(inputs)) for inputs in input_sets]
    aot_eager = lookup_backend("aot_eager")
    graphs = 0

    def counting(module: Any, example_inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return aot_eager(module, example_inputs)

    torch._dynamo.reset()
    whole = torch.compile(fn, fullgraph=True, dynamic=True, backend=counting)
    for index, (inputs, expected) in enumerate(zip(input_sets, eager, strict=True)):
        try:
            actual = run_with_gradients(whole, fresh(inputs))
        except TorchDynamoException as error:
            raise CheckFailure(f"input set {index}: not one whole graph: {error}") from error
        # A compiled module names its parameters _orig_mod.<name>; only the label differs.
        check_runs_equal(actual, expected, what=f"input set {index}, compiled: ")
    torch._dynamo.reset()
    if not 1 <= graphs <= max_graphs:
        raise CheckFailure(
            f"{graphs} graphs for {len(input_sets)} input sets; at most {max_graphs} allowed, "
            f"at least 1 needed"
        )


_MESSAGE = re.compile(r"[\w.:-]+: .+; .+", re.DOTALL)


def check_refuses(
    rows: Sequence[tuple[Callable[[], Any], type[Exception], str]],
) -> None:
    """Fixed test 8: wrong input is refused, with the right error and a message that helps.

    A message has the form ``<op>: <name> must <rule>; got <value>; <what to do>``: it begins with
    the operator's name and a colon and has at least one semicolon. Pydantic's own
    ``ValidationError`` is exempt from the form.

    Args:
        rows: (call, error, regex) of each refusal; the regex is searched in the message.

    Raises:
        CheckFailure: a call succeeded, raised something else, or its message lacks a part.

    Example:
        ``check_refuses([(lambda: op(x_TD, impl="no"), UnsupportedError, 'impl must .* "no"')])``
    """
    if not rows:
        raise CheckFailure("check_refuses needs at least one row")
    for index, (call, expected, pattern) in enumerate(rows):
        where = f"row {index} ({expected.__name__}, {pattern!r})"
        try:
            call()
        except expected as error:
            message = str(error)
        except Exception as error:
            raise CheckFailure(f"{where}: raised {type(error).__name__}: {error}") from error
        else:
            raise CheckFailure(f"{where}: was accepted")
        if not issubclass(expected, GemError | ValidationError):
            raise CheckFailure(f"{where}: expect a GemError or pydantic's ValidationError")
        if not re.search(pattern, message):
            raise CheckFailure(f"{where}: message is {message!r}")
        if issubclass(expected, GemError) and not _MESSAGE.fullmatch(message):
            raise CheckFailure(
                f"{where}: message lacks the form '<op>: <rule>; got <value>; <what to do>': "
                f"{message!r}"
            )


def check_contract_json(module: ModuleType, path: Path | str) -> None:
    """Compare a contract with its committed JSON schema, so that no interface changes unseen.

    Args:
        module: the imported ``contract.py``.
        path: the package's ``tests/contract.json``.

    Raises:
        CheckFailure: they differ; the message is the diff and how to write the file anew.
    """
    path = Path(path)
    now = contract_json(module)
    committed = path.read_text(encoding="utf-8") if path.exists() else ""
    if committed and json.loads(committed) == json.loads(now):
        return
    diff = "\n".join(
        difflib.unified_diff(committed.splitlines(), now.splitlines(), "committed", "now", n=2)
    )
    raise CheckFailure(
        f"{module.__name__} differs from {path.name}. If the change is wanted, write it with "
        f"gem_opkit.contract.write_contract_json, bump the version, add a changelog line.\n{diff}"
    )


def run_fresh(code: str, *, blocked: Sequence[str] = (), timeout_s: float = 120.0) -> str:
    """Run code in a fresh Python process, with some modules made impossible to import.

    Args:
        code: Python statements.
        blocked: names of top-level modules whose import fails there.
        timeout_s: seconds after which the process is stopped.

    Returns:
        what the code printed.

    Raises:
        CheckFailure: it ended with an error; the message holds its output.
    """
    # None in sys.modules makes an import fail as that of a module that is not installed.
    prelude = f"import sys\nfor _name in {list(blocked)!r}:\n    sys.modules[_name] = None\n"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", prelude + code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise CheckFailure(f"fresh process failed ({done.returncode}):\n{done.stderr[-4000:]}")
    return done.stdout


def run_without_triton(code: str, *, timeout_s: float = 120.0) -> str:
    """Run code in a fresh process in which ``import triton`` fails.

    Args:
        code: Python statements, for example a call of an operator with impl="reference".
        timeout_s: seconds after which the process is stopped.

    Returns:
        what the code printed.

    Raises:
        CheckFailure: it ended with an error.
    """
    return run_fresh(code, blocked=("triton",), timeout_s=timeout_s)


def check_torch_free(*modules: str) -> None:
    """Check that modules can be imported where torch cannot.

    Args:
        *modules: full names, for example ``"gem_opkit.contract"``.

    Raises:
        CheckFailure: an import needs torch or triton; the message shows by which line.
    """
    imports = "\n".join(f"import {module}" for module in modules)
    run_fresh(imports, blocked=("torch", "triton"))
