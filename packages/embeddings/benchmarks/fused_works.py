"""Lookups of ranking models, our kernels on them, and fbgemm's fused tables as the peer.

Shared by ``bench_table_lookup`` and ``bench_table_update``.

Ids are drawn by a bounded Zipf law with exponent 1.05, scattered over the rows, or uniformly.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.kernels.table_lookup.cases import CASES, TableCase
from gem_embeddings.kernels.table_lookup.cost import table_lookup_cost
from gem_embeddings.kernels.table_update.cost import table_update_cost
from gem_embeddings.ops import TableLayout, table_lookup, table_update
from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group
from gem_opkit.cost import Cost

SPEC = OptimizerSpec(kind="rowwise_adagrad", lr=0.01)
_SCATTER = 2_654_435_761  # odd, so that it permutes the rows of most tables and thins out few
_ZIPF = 1.05


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def draw_ids(case: TableCase, device: str) -> Tensor:
    """Draw the ids of all features."""
    count = case.tables * case.examples * case.ids
    if not case.zipf:
        return torch.randint(0, case.rows, (count,), device=device)
    # The inverse of the distribution of a continuous power law on [1, rows + 1).
    u = torch.rand(count, dtype=torch.float64, device=device)
    power = 1.0 - _ZIPF
    rank = ((((case.rows + 1.0) ** power - 1.0) * u + 1.0) ** (1.0 / power)).long() - 1
    return rank.clamp_(0, case.rows - 1) * _SCATTER % case.rows


class FusedWork:
    """Tables, a batch and a gradient on a device."""

    def __init__(self, case: TableCase, device: str) -> None:
        self.case, self.device = case, device
        shapes = [(case.rows, case.width)] * case.tables
        self.layout = TableLayout.packed(shapes, [(i, case.pooling) for i in range(case.tables)])
        self.weights = torch.empty(
            self.layout.elements, dtype=DTYPES[case.row_dtype], device=device
        )
        self.weights.uniform_(-0.01, 0.01)
        self.state = torch.zeros(self.layout.rows, device=device)
        self.ids = draw_ids(case, device)
        self.counts = [case.examples * case.ids] * case.tables
        bags = case.tables * case.examples
        self.bags = torch.arange(bags + 1, device=device) * case.ids
        self.vectors = bags if case.pooling != "none" else self.ids.shape[0]
        self.grad = torch.randn(self.vectors * case.width, device=device) / case.examples
        self.step = 0

    def forward(self, **options: Any) -> Tensor:
        """Look up the batch."""
        return table_lookup(
            self.weights, self.ids, self.bags, self.layout,
            counts=self.counts, longest=self.case.ids, **options,
        )[0]  # fmt: skip

    def update(self, **options: Any) -> None:
        """Move the rows by the gradient."""
        self.step += 1
        seed = None if self.case.row_dtype == "fp32" else 0
        table_update(
            self.weights, [self.state], self.ids, self.bags, self.grad, self.layout,
            counts=self.counts, spec=SPEC, step=self.step, seed=seed, **options,
        )  # fmt: skip

    def costs(self) -> tuple[Cost, Cost]:
        """Return the cost of the lookup and of the update."""
        case = self.case
        unique = [int(part.unique().shape[0]) for part in self.ids.split(self.counts)]
        sizes: dict[str, Any] = {
            "ids": self.counts,
            "vectors": [self.vectors // case.tables] * case.tables,
            "rows": unique,
            "widths": [case.width] * case.tables,
            "row_bytes": self.weights.element_size(),
        }
        return table_lookup_cost(**sizes), table_update_cost(SPEC, **sizes)

    def _sample(self) -> Tensor:
        """Rows over all tables that the batch names: some of its first table, the hottest too."""
        ids = self.ids[: self.counts[0]]
        return torch.cat([ids[:200], ids.mode().values[None]]).unique()

    def check_forward(self) -> None:
        """Compare some vectors with plain torch."""
        case = self.case
        out = self.forward().view(self.vectors, case.width)
        some = torch.linspace(0, self.vectors - 1, 500).long().to(self.device)
        span = case.ids if case.pooling != "none" else 1
        ids = self.ids.view(self.vectors, span)[some]
        table = some * span // self.counts[0]
        rows = self.weights.view(-1, case.width)[(table[:, None] * case.rows + ids).flatten()]
        expected = rows.double().view(len(some), span, case.width).sum(1)
        torch.testing.assert_close(out[some].double(), expected, rtol=1e-5, atol=1e-6)

    def check_update(self) -> None:
        """Compare some rows of the first table with the formula."""
        case, rows = self.case, self._sample()
        table = self.weights[: case.rows * case.width].view(case.rows, case.width)
        before, state = table[rows].double(), self.state[rows].double()
        ids = self.ids[: self.counts[0]]
        grad = self.grad.view(self.vectors, case.width)
        span = case.ids if case.pooling != "none" else 1
        sums = torch.zeros(len(rows), case.width, dtype=torch.float64, device=self.device)
        for index, row in enumerate(rows.tolist()):
            places = (ids == row).nonzero().squeeze(1) // span
            sums[index] = grad[places].double().sum(0)
        self.update()
        state = state + sums.square().mean(1)
        expected = before - SPEC.lr * sums / (state.sqrt() + SPEC.eps)[:, None]
        wrong = (table[rows].double() - expected).abs() - 1e-5 * expected.abs() - 1e-6
        if case.row_dtype != "fp32":
            # Rounded by chance: to either neighbour.
            bits = {"fp16": 11, "bf16": 8}[case.row_dtype]
            wrong -= torch.ldexp(torch.ones_like(expected), torch.frexp(expected).exponent - bits)
        if float(wrong.max()) > 0:
            raise ValueError(f"{case.name}: a row is {float(wrong.max()):.1e} away from the rule")
        torch.testing.assert_close(self.state[rows].double(), state, rtol=1e-4, atol=1e-12)


class FbgemmWork:
    """The same batch on fbgemm's fused tables, whose backward pass moves the rows."""

    def __init__(self, work: FusedWork) -> None:
        ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        config = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        case, kinds = work.case, config.SparseType
        on_gpu = work.device != "cpu"
        place = common.EmbeddingLocation.DEVICE if on_gpu else common.EmbeddingLocation.HOST
        device = ops.ComputeDevice.CUDA if on_gpu else ops.ComputeDevice.CPU
        none = case.pooling == "none"
        self.tables = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [(case.rows, case.width, place, device)] * case.tables,
            optimizer=config.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=SPEC.lr,
            eps=SPEC.eps,
            weights_precision=kinds.FP16 if case.row_dtype == "fp16" else kinds.FP32,
            output_dtype=kinds.FP32,
            pooling_mode=common.PoolingMode.NONE if none else common.PoolingMode.SUM,
        )
        for weight in self.tables.split_embedding_weights():
            weight.uniform_(-0.01, 0.01)
        self.ids, self.bags = work.ids, work.bags
        out = self.forward()
        self.out, self.grad = out, torch.randn_like(out) / case.examples

    def forward(self) -> Tensor:
        """Look up the batch."""
        return self.tables(self.ids, self.bags)

    def update(self) -> None:
        """Move the rows by the gradient."""
        self.out.backward(self.grad, retain_graph=True)


def fbgemm_calls(work: FusedWork) -> dict[str, Callable[[], Any]]:
    """Return forward and backward of the peer; nothing where it is not there, or rows are bf16."""
    if work.case.row_dtype == "bf16":
        return {}
    try:
        peer = FbgemmWork(work)
    except ImportError:
        return {}
    return {"forward": peer.forward, "update": peer.update}


def shapes_of(case: TableCase) -> dict[str, Any]:
    """Return what a reader needs to repeat a case."""
    return {
        "tables": case.tables,
        "rows": case.rows,
        "examples": case.examples,
        "ids": case.ids,
        "width": case.width,
        "pooling": case.pooling,
        "zipf": case.zipf,
    }


def groups_of(device: str, make: Callable[[FusedWork], BenchCase]) -> Iterable[Group]:
    """Return a group of one row for each case that the device takes."""
    for case in (case for case in CASES if device.startswith(case.device)):
        yield case.name, lambda case=case: [make(FusedWork(case, device))]
