"""Optimizers of embedding tables: only rows that a batch has looked up move.

All read sparse gradients as ``gem_embeddings.tables`` makes them; any other sparse gradient is
coalesced first, and in a dense one the rows that are not all zero count as looked up. On a CPU a
step is deterministic. State and learning rate are saved by ``state_dict`` and resumed bit for bit.
The rules themselves stand in ``gem_embeddings.rules``.

Left out: an optimizer that runs inside the backward pass; engines of sharded tables have theirs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from gem_embeddings.contract import OptimizerSpec, TableOptimizer
from gem_embeddings.lookup import sum_by_row
from gem_embeddings.rules import STATE_NAMES, is_row_wise, row_steps, spec_of
from gem_opkit.errors import ConfigError, ShapeError, refusal
from gem_parallel.collectives import all_gather_rows
from gem_parallel.launch import World


class _RowOptimizer(torch.optim.Optimizer):
    """What the optimizers share: the walk over parameters, reading a gradient, moving its rows."""

    _kind: TableOptimizer

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        _check_hyperparameters(type(self).__name__, defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add tables with hyperparameters of their own; the constructor calls this too.

        Args:
            param_group: ``params`` and what differs from the defaults.

        Raises:
            ConfigError: a hyperparameter out of range.
        """
        _check_hyperparameters(type(self).__name__, {**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move the rows that the gradients name.

        Args:
            closure: recomputes the loss, as in torch's optimizers.

        Returns:
            the closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight_RE in group["params"]:
                if weight_RE.grad is not None:
                    rows_I, grad_IE = gradient_rows(weight_RE.grad)
                    self._update(weight_RE, rows_I, grad_IE, group)
        return loss

    def _update(
        self, weight_RE: Tensor, rows_I: Tensor, grad_IE: Tensor, group: dict[str, Any]
    ) -> None:
        state, names = self.state[weight_RE], STATE_NAMES[self._kind]
        if not state:
            shape = weight_RE.shape[:1] if is_row_wise(self._kind) else weight_RE.shape
            state["step"] = torch.zeros((), dtype=torch.int64)
            for name in names:
                state[name] = weight_RE.new_zeros(shape, requires_grad=False)
        state["step"] += 1
        beta1, beta2 = group.get("betas", (0.0, 0.0))
        spec = spec_of(
            self._kind,
            eps=group.get("eps", 1.0),
            beta1=beta1,
            beta2=beta2,
            moment_scale=group.get("moment_scale", 1.0),
        )
        moved = [state[name].index_select(0, rows_I) for name in names]
        change_IE = row_steps(spec, grad_IE, moved, lr=group["lr"], step=int(state["step"]))
        for name, rows in zip(names, moved, strict=True):
            state[name].index_copy_(0, rows_I, rows)
        weight_RE.index_add_(0, rows_I, change_IE)


class RowWiseAdagrad(_RowOptimizer):
    """Adagrad with one accumulator a row instead of one an element.

    For every row r that the gradient g names, with c the moment scale:

        state_r ← state_r + mean(g_r²)
        w_r     ← w_r − lr · g_r / (sqrt(state_r / c) + eps)

    Args:
        params: table weights, or torch's parameter groups.
        lr: learning rate, above 0.
        eps: added to the square root, above 0.
        moment_scale: what the accumulator is divided by, above 0: 1, or the number of replica
            groups that each see a part of the batch.

    Raises:
        ConfigError: a hyperparameter out of range.

    Source: the rule that fbgemm calls exact row-wise Adagrad; with c, momentum-scaled row-wise
        AdaGrad of two-dimensional sparse parallelism.
    """

    _kind = "rowwise_adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.02,
        eps: float = 1e-8,
        moment_scale: float = 1.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "moment_scale": moment_scale})


class Adagrad(_RowOptimizer):
    """Adagrad with an accumulator for each element, of the rows that are looked up.

    For every row r that the gradient g names:

        state_r ← state_r + g_r²
        w_r     ← w_r − lr · g_r / (sqrt(state_r) + eps)

    Args:
        params: table weights, or torch's parameter groups.
        lr: learning rate, above 0.
        eps: added to the square root, above 0.

    Raises:
        ConfigError: a hyperparameter out of range.

    Source: Duchi, Hazan and Singer 2011.
    """

    _kind = "adagrad"

    def __init__(self, params: Iterable[Any], *, lr: float = 0.02, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})


class Sgd(_RowOptimizer):
    """Plain gradient descent of the rows that are looked up: w_r ← w_r − lr · g_r.

    Args:
        params: table weights, or torch's parameter groups.
        lr: learning rate, above 0.

    Raises:
        ConfigError: a hyperparameter out of range.
    """

    _kind = "sgd"

    def __init__(self, params: Iterable[Any], *, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})


class Adam(_RowOptimizer):
    """Adam whose moments of a row move only when the row is looked up (lazy Adam).

    With t the number of steps in which this table had a gradient, for every row r that the
    gradient g names:

        m_r ← β₁ m_r + (1 − β₁) g_r        v_r ← β₂ v_r + (1 − β₂) g_r²
        w_r ← w_r − lr · (m_r / (1 − β₁ᵗ)) / (sqrt(v_r / (1 − β₂ᵗ)) + eps)

    Rows that the gradient does not name keep weight and both moments: nothing decays while a row
    is unseen, and it does not drift on its old momentum. The correction by t is the table's, not
    the row's, so the first step of a row that is seen late is smaller than that of one seen at
    once. Where every row is seen in every step this is ``torch.optim.Adam``.

    Args:
        params: table weights, or torch's parameter groups.
        lr: learning rate, above 0.
        betas: decays of the two moments, each in [0, 1).
        eps: added to the square root, above 0.

    Raises:
        ConfigError: a hyperparameter out of range.

    Source: Kingma and Ba 2015 (arXiv:1412.6980), applied to the rows seen.
    """

    _kind = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})


def table_optimizer(
    params: Iterable[Tensor], spec: OptimizerSpec
) -> RowWiseAdagrad | Adagrad | Sgd | Adam:
    """Make the optimizer that a spec describes.

    Args:
        params: table weights, as ``EmbeddingTables.table_parameters`` gives them.
        spec: kind and hyperparameters.

    Returns:
        the optimizer.
    """
    if spec.kind == "rowwise_adagrad":
        return RowWiseAdagrad(params, lr=spec.lr, eps=spec.eps, moment_scale=spec.moment_scale)
    if spec.kind == "adagrad":
        return Adagrad(params, lr=spec.lr, eps=spec.eps)
    if spec.kind == "sgd":
        return Sgd(params, lr=spec.lr)
    return Adam(params, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps)


def gradient_rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that a gradient names, each once, and their gradients.

    Args:
        grad: (R, E), sparse over its rows, or dense.

    Returns:
        rows_I, int64, ascending, and grad_IE. Of a dense gradient, the rows that are not zero.

    Raises:
        ShapeError: another number of dims, or sparse within its rows too.
    """
    if grad.ndim != 2 or (grad.is_sparse and grad.sparse_dim() != 1):
        raise ShapeError(
            refusal(
                "gradient_rows",
                "grad",
                must="have two dims and be dense, or sparse over its rows alone",
                got=f"shape {tuple(grad.shape)}, sparse in "
                f"{grad.sparse_dim() if grad.is_sparse else 0} dims",
                fix="give the gradient of a table; to_dense() makes one of any sparse tensor",
            )
        )
    if grad.is_sparse:
        # Autograd drops the mark of a coalesced gradient on its way to the parameter. Looking
        # whether the rows ascend is far cheaper than sorting what is sorted.
        rows_I = grad._indices()[0]
        if not grad.is_coalesced() and bool((rows_I[1:] > rows_I[:-1]).all()):
            return rows_I, grad._values()
        grad = grad.coalesce()
        return grad.indices()[0], grad.values()
    rows_I = (grad != 0).any(dim=1).nonzero().squeeze(1)
    return rows_I, grad.index_select(0, rows_I)


def merge_sparse_gradients(params: Sequence[Tensor], world: World) -> None:
    """Replace the gradient of every table by its average over ranks.

    As data-parallel training of dense weights does: the sum over ranks, divided by their number.
    A rank that looked up no row of a table takes part with none. All tables travel together, so
    a step needs one exchange of rows and one of values for each embedding width.

    Args:
        params: table weights, the same tables in the same order on every rank. Gradients are
            replaced: by coalesced sparse ones with the rows of all ranks.
        world: the ranks; with one, nothing happens.

    Raises:
        ShapeError: a weight that is not two-dimensional.
    """
    if world.size == 1:
        return
    for index, weight_RE in enumerate(params):
        if weight_RE.ndim != 2:
            raise ShapeError(
                refusal(
                    "merge_sparse_gradients",
                    f"params[{index}]",
                    must="have two dims",
                    got=f"shape {tuple(weight_RE.shape)}",
                    fix="pass the weights of tables",
                )
            )
    for width in sorted({weight_RE.shape[1] for weight_RE in params}):
        _merge([weight_RE for weight_RE in params if weight_RE.shape[1] == width], world)


def _merge(params: list[Tensor], world: World) -> None:
    """Average the gradients of tables of one width."""
    rows: list[Tensor] = []
    values: list[Tensor] = []
    first_row = 0
    for weight_RE in params:
        if weight_RE.grad is not None:
            rows_I, grad_IE = gradient_rows(weight_RE.grad)
            rows.append(rows_I + first_row)  # as if all tables were one
            values.append(grad_IE)
        first_row += weight_RE.shape[0]
    width = params[0].shape[1]
    nothing = params[0].new_zeros((0, width))
    rows_I = torch.cat([*rows, nothing.new_zeros(0, dtype=torch.int64)])
    rows_I = all_gather_rows(rows_I, world)
    # The order of ranks is the order of addition, so every rank gets the same bits.
    values_IE = all_gather_rows(torch.cat([*values, nothing]), world).div_(world.size)
    merged = sum_by_row([rows_I], [values_IE], (first_row, width))
    rows_I, values_IE = merged.indices()[0], merged.values()
    ends = torch.tensor([weight.shape[0] for weight in params]).cumsum(0).to(rows_I.device)
    cuts = torch.searchsorted(rows_I, ends).tolist()
    begin = first_row = 0
    for weight_RE, end in zip(params, cuts, strict=True):
        weight_RE.grad = torch.sparse_coo_tensor(
            rows_I[None, begin:end] - first_row,
            values_IE[begin:end],
            tuple(weight_RE.shape),
            is_coalesced=True,
            check_invariants=False,
        )
        begin, first_row = end, first_row + weight_RE.shape[0]


def _check_hyperparameters(op: str, values: dict[str, Any]) -> None:
    for name in ("lr", "eps", "moment_scale"):
        if not 0 < values.get(name, 1.0) < math.inf:
            raise ConfigError(
                refusal(
                    op,
                    name,
                    must="be above 0 and finite",
                    got=values[name],
                    fix="pass a small number",
                )
            )
    for beta in values.get("betas", ()):
        if not 0 <= beta < 1:
            raise ConfigError(
                refusal(op, "betas", must="be in [0, 1)", got=beta, fix="0.9 and 0.999 are usual")
            )
