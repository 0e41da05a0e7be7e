"""Work of a trace is given to the module, the kind and the step that it belongs to."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gem.bench.kinds import KINDS, Origin, kind_of
from gem.bench.record import record
from gem.bench.regions import ModuleRanges
from gem.bench.shares import shares_of
from gem.bench.trace import Piece, read_trace
from gem.train.clock import StepClock
from gem.train.compiled import CompiledRegion
from gem_opkit.errors import MeasurementError

MAIN, ENGINE = 1, 2


class Recorded:
    """Writes events as the profiler does on a GPU; times are microseconds."""

    def __init__(self):
        self.events = []

    def host(self, cat, name, begin, end, *, thread=MAIN, **args):
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": thread}
            | {"args": args}
        )

    def range(self, name, begin, end):
        self.host("user_annotation", name, begin, end)

    def op(self, name, begin, end, *, thread=MAIN, sequence=None, forward_thread=0, id=None):
        known = {"Sequence number": sequence, "Fwd thread id": forward_thread} if sequence else {}
        known |= {"External id": id} if id else {}
        self.host("cpu_op", name, begin, end, thread=thread, **known)

    def launch(self, at, kernel, begin, end, *, thread=MAIN, cat="kernel", by=None):
        """A kernel that is launched at one time and runs at another."""
        number = len(self.events) + 1
        caller = {"External id": by} if by else {}
        self.host("cuda_driver", "cuLaunchKernelEx", at, at + 1, thread=thread, correlation=number)
        self.events.append(
            {"ph": "X", "cat": cat, "name": kernel, "ts": begin, "dur": end - begin, "tid": 7}
            | {"args": {"correlation": number, "stream": 7, **caller}}
        )


def two_steps():
    """A step that only fills the device, and one whose every kernel has a place."""
    r = Recorded()
    r.range("gem step: 0", 0, 100)
    r.launch(10, "fill", 50, 200)
    r.range("gem step: 1", 100, 1000)
    r.range("gem: data", 101, 110)
    r.launch(105, "Memcpy HtoD (Pinned -> Device)", 210, 220, cat="gpu_memcpy")
    r.range("gem: forward", 110, 300)
    r.range("gem module: layers.0.experts", 120, 200)
    r.op("aten::linear", 130, 160, sequence=40)
    r.op("aten::mm", 140, 150, sequence=40)
    r.launch(145, "nvjet_sm90_tst_256x160", 230, 260)
    r.op("aten::relu", 161, 170, sequence=41)
    r.launch(165, "vectorized_elementwise_kernel", 260, 270)
    r.range("gem module: heads", 210, 290)
    r.op("aten::view", 212, 215, sequence=42)  # has no derivative: the next operator's number
    r.op("gem_attention::pooled_attention", 220, 250, sequence=42)
    r.launch(230, "forward_kernel", 270, 300)
    r.op("gem_attention::rotary_heads", 255, 260, sequence=43)
    r.launch(257, "_turn_kernel", 300, 305)
    r.range("gem: backward", 300, 500)
    evaluate = "autograd::engine::evaluate_function: "
    r.op(f"{evaluate}PooledBackward", 310, 330, thread=ENGINE, sequence=42, forward_thread=1)
    r.op("gem_attention::pooled_attention_backward", 312, 328, thread=ENGINE)
    r.launch(320, "backward_kernel", 320, 400, thread=ENGINE)
    r.op(f"{evaluate}MmBackward0", 331, 360, thread=ENGINE, sequence=40, forward_thread=1)
    r.op("aten::mm", 335, 345, thread=ENGINE, id=77)
    # By the driver's clock before its operator, and in the one before.
    r.launch(325, "nvjet_sm90_tst_128x128", 400, 430, thread=ENGINE, by=77)
    accumulate = "torch::autograd::AccumulateGrad"
    r.op(f"{evaluate}{accumulate}", 361, 370, thread=ENGINE)
    r.launch(365, "vectorized_elementwise_kernel", 430, 440, thread=ENGINE)
    r.launch(368, "ncclDevKernel_AllReduce", 420, 470, thread=ENGINE)
    r.range("gem: tables", 500, 600)
    r.launch(550, "indexing_backward_kernel", 520, 540)
    r.range("gem: optimizer", 600, 900)
    r.launch(650, "multi_tensor_apply_kernel", 540, 600)
    return r.events


def pieces_of(events):
    return {(p.name, p.begin_us): p for p in read_trace(events).pieces}


def test_every_kernel_has_its_place():
    found = {name: (p.kind, p.region, p.phase) for (name, _), p in pieces_of(two_steps()).items()}
    assert found == {
        "Memcpy HtoD (Pinned -> Device)": ("data", "data", "outside"),
        "nvjet_sm90_tst_256x160": ("products", "layers.0.experts", "forward"),
        "forward_kernel": ("attention", "heads", "forward"),
        "_turn_kernel": ("elementwise", "heads", "forward"),
        "backward_kernel": ("attention", "heads", "backward"),
        "nvjet_sm90_tst_128x128": ("products", "layers.0.experts", "backward"),
        # The last of this name: nobody knows for whom gradients were summed.
        "vectorized_elementwise_kernel": ("elementwise", "", "backward"),
        "ncclDevKernel_AllReduce": ("collectives", "", "backward"),
        "indexing_backward_kernel": ("tables", "tables", "outside"),
        "multi_tensor_apply_kernel": ("optimizer", "optimizer", "outside"),
    }
    relu = pieces_of(two_steps())["vectorized_elementwise_kernel", 260]
    assert (relu.region, relu.phase) == ("layers.0.experts", "forward")


def test_shares_are_those_counted_by_hand():
    shares = shares_of(read_trace(two_steps()))
    # From the end of the step before (200) to the end of the last kernel (600).
    assert (shares.steps, shares.step_ms) == (1, pytest.approx(0.4))
    assert shares.by_kind() == pytest.approx(
        {
            "data": 0.010,
            "products": 0.030 + 0.030,
            "elementwise": 0.010 + 0.005 + 0.010,
            "attention": 0.030 + 0.080,
            "collectives": 0.030,  # 420 to 440 is hidden behind compute
            "tables": 0.020,
            "optimizer": 0.060,
        }
    )
    assert shares.hidden_by_kind() == pytest.approx({"collectives": 0.020})
    assert shares.kernel_ms(kind="collectives") == pytest.approx(0.050)
    assert shares.kernel_ms(kind="products", region="layers.0.experts") == pytest.approx(0.060)
    # 200-210, 220-230, 305-320 and 470-520: what came after each waited for the host.
    waited = {"data": 0.010, "layers.0.experts": 0.010, "heads": 0.015, "tables": 0.050}
    assert shares.waited_ms == pytest.approx(waited)
    assert shares.gap_ms == pytest.approx(0.085)
    assert sum(shares.by_kind().values()) + shares.gap_ms == pytest.approx(shares.step_ms)
    assert shares.launches["layers.0.experts", "backward", "products"] == 1
    assert shares.of(region="heads", phase="backward", kind="attention") == pytest.approx(0.08)


def test_a_kernel_from_before_the_trace_is_nobodys():
    events = two_steps()
    orphan = {"ph": "X", "cat": "kernel", "name": "old", "ts": 205, "dur": 3, "tid": 7}
    events.append(orphan | {"args": {"correlation": 99_999}})
    assert "old" not in {p.name for p in read_trace(events).pieces}


@pytest.mark.parametrize(
    "events",
    [[], [e for e in two_steps() if e["name"] != "gem step: 0"]],
    ids=["nothing", "one step"],
)
def test_a_trace_without_two_steps_is_refused(events):
    with pytest.raises(MeasurementError, match="trace must hold two steps"):
        read_trace(events)


@pytest.mark.parametrize(
    ("origin", "name", "kind"),
    [
        (Origin(inner="aten::_scaled_dot_product_flash_attention"), "pytorch_flash", "attention"),
        (Origin(inner="aten::bmm"), "Memset (Device)", "products"),
        (Origin(), "void cutlass::Kernel2<cutlass_80_tensorop>", "products"),
        (Origin(), "triton_tem_fused_mm_1", "products"),
        (Origin(), "_generalized_attention_forward_kernel", "attention"),
        (Origin(), "triton_poi_fused_mul_0", "elementwise"),
        (Origin(own="gem_precision::normed_linear"), "_forward_kernel", "products"),
        (Origin(own="gem_jagged::jagged_dense_bmm_backward"), "_backward_kernel", "products"),
        (Origin(own="gem_precision::gated_residual"), "_forward_kernel", "elementwise"),
        (Origin(own="gem_precision::rms_norm"), "_forward_kernel", "elementwise"),
        (Origin(own="gem_embeddings::table_lookup"), "_lookup_kernel", "tables"),
        (Origin(section="tables", inner="aten::mm"), "nvjet", "tables"),
        (Origin(), "Memcpy HtoD (Pageable -> Device)", "data"),
        (Origin(own="gem_attention::block_attention"), "Memcpy HtoD (Pageable)", "attention"),
        (Origin(section="optimizer"), "ncclDevKernel_AllGather", "collectives"),
        (Origin(inner="c10d::allreduce_"), "c10d::allreduce_", "collectives"),
    ],
)
def test_kinds(origin, name, kind):
    assert kind_of(origin, name) == kind
    assert kind in KINDS


def test_pieces_that_overlap_count_once():
    """Against a count microsecond by microsecond."""
    draw = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, 300, (60, 3), generator=draw).tolist()
    pieces = [
        Piece(
            begin, begin + 1 + length % 40, KINDS[kind % len(KINDS)], f"r{kind % 3}", "forward", ""
        )
        for begin, length, kind in numbers
    ]
    pieces.sort(key=lambda p: p.begin_us)
    begin, end = 10.0, 320.0

    class Given:
        steps = 1

    Given.pieces, Given.begin_us, Given.end_us = pieces, begin, end
    shares = shares_of(Given)
    exposed, hidden, gaps = {}, {}, 0
    for at in range(int(begin), int(end)):
        active = [p for p in pieces if p.begin_us <= at < p.end_us]
        behind = ("collectives", "data")
        active.sort(key=lambda p: (p.kind in behind, p.begin_us))
        for place, piece in enumerate(active):
            into = hidden if place else exposed
            into[piece.kind] = into.get(piece.kind, 0) + 1
        gaps += not active
    assert shares.by_kind() == pytest.approx({k: 1e-3 * n for k, n in exposed.items()})
    assert shares.hidden_by_kind() == pytest.approx({k: 1e-3 * n for k, n in hidden.items()})
    assert shares.gap_ms == pytest.approx(1e-3 * gaps)
    assert sum(shares.waited_ms.values()) == pytest.approx(shares.gap_ms)


class Chain(nn.Sequential):
    def forward(self, x):  # the compiler leaves torch's own modules alone
        for layer in self:
            x = layer(x)
        return x


class Two(nn.Module):
    """Three products without a derivative of the input, then two that have one."""

    def __init__(self, *, again):
        super().__init__()
        self.first = Chain(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        self.second = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
        self.again = again

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=False) if self.again else self.second(x)


@pytest.mark.parametrize(
    ("again", "compiled"),
    [(False, False), (True, False), (False, True)],
    ids=["kept", "computed again", "one module compiled"],
)
def test_a_recorded_backward_pass_finds_its_modules(again, compiled):
    """Counts of products are those of the layers: one forward, one for each gradient."""
    model = Two(again=again)
    if compiled:
        model.first.forward = CompiledRegion(model.first, "aot_eager")
    clock = StepClock(torch.device("cpu"))
    ranges = ModuleRanges(model, ["first", "second", "not there"])

    def run(number):
        clock.begin_step()
        clock.mark("forward")
        loss = model(torch.ones(4, 8)).square().sum()
        clock.mark("backward")
        loss.backward()
        clock.mark("optimizer")
        torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
        clock.end_step()

    run(0)
    shares = shares_of(read_trace(record(run, 2, clock=clock, ranges=ranges)))
    assert shares.steps == 2
    products = {key[:2]: n for key, n in shares.launches.items() if key[2] == "products"}
    assert products == {
        ("first", "forward"): 3,
        ("first", "backward"): 5,  # the input is data
        ("second", "forward"): 2,
        ("second", "backward"): 6 if again else 4,
    }
    assert shares.launches["optimizer", "outside", "optimizer"] >= 1
    whole = sum(shares.exposed_ms.values()) + shares.gap_ms
    assert whole == pytest.approx(shares.step_ms)
    assert 0 < shares.gap_ms < shares.step_ms
    ranges.remove()
    assert not model.first._forward_hooks
    assert not model.first._forward_pre_hooks
