"""The document that `gem bench step --json` prints. Imports no torch.

``version`` grows when a field changes its meaning or goes away; new fields may come without it.
"""

from typing import Any, Literal

from pydantic import Field

from gem_opkit.contract import Bytes, Contract, Flops, Milliseconds

VERSION = 1
GAPS = "host gaps"


class KindShare(Contract):
    """What one kind of work takes of a step."""

    kind: str = Field(description="a kind of gem.bench.kinds, or host gaps")
    ms: Milliseconds
    share: float = Field(ge=0, le=1, description="of the profiled step; all kinds add up to 1")
    hidden_ms: Milliseconds = Field(description="ran beside something else, which counts instead")
    launches: float = Field(ge=0, description="kernels and copies a step; operators on a CPU")


class PassWork(Contract):
    """FLOPs of one kind, forward and backward, and the time that they took."""

    flops: Flops
    ms: Milliseconds = Field(description="in which that ran")
    tflops_per_s: float | None = Field(description="null where no time was seen")
    peak_frac: float | None = Field(
        description="of the device's peak; null where that is unknown, above 1 where a kernel of "
        "another kind did some of the work"
    )


class RegionShare(Contract):
    """What a module, or a layer, takes of a step."""

    name: str = Field(description="qualified name; tables, optimizer, data; rest: no module's")
    forward_ms: Milliseconds
    backward_ms: Milliseconds
    outside_ms: Milliseconds = Field(description="of what is no part of the model's passes")
    share: float = Field(ge=0, le=1, description="of the profiled step, without gaps")
    kinds_ms: dict[str, Milliseconds] = Field(description="kind -> milliseconds, both passes")
    waited_ms: Milliseconds = Field(description="gaps of the device that ended with its work")
    launches: float = Field(ge=0)
    whole: PassWork = Field(description="all FLOPs over all time: the module's local MFU")
    attention: PassWork = Field(description="scores, and what they weigh; time of their kernels")
    products: PassWork = Field(description="all other products; likewise")


class Profile(Contract):
    """Where the time of a step goes, from a profiler's trace of a few steps."""

    steps: int = Field(ge=1)
    step_ms: Milliseconds = Field(description="under the profiler, which slows the host")
    busy_ms: Milliseconds = Field(description="in which the device worked; on a CPU, in operators")
    kinds: tuple[KindShare, ...]
    layers: tuple[RegionShare, ...] = Field(description="modules by layer; the others as they are")
    regions: tuple[RegionShare, ...] = Field(description="module by module")
    attention: PassWork
    products: PassWork


class StepMemory(Contract):
    """Memory of one rank; null on a CPU, whose allocations are not counted."""

    parameter_bytes: Bytes = Field(description="weights, dense and of tables")
    optimizer_bytes: Bytes = Field(description="moments, accumulators and averages")
    kept_bytes: Bytes | None = Field(description="of the forward pass, kept for the backward pass")
    peak_bytes: Bytes | None = Field(description="most that was allocated at a time")
    peak_ratio: float | None = Field(description="the peak over the sum of the three")


class Efficiency(Contract):
    """MFU of the timed steps. Null where the device's peak is unknown, as a CPU's is."""

    peak_tflops: float | None = Field(description="dense BF16 peak of one device")
    peak_source: str | None
    e2e_mfu: float | None = Field(description="model FLOPs / (GPUs x peak x step)")
    local_mfu: float | None = Field(description="the same, without waiting for other ranks")
    scaling_ratio: float | None = Field(description="e2e_mfu over local_mfu; 1 on one GPU")


class StepReport(Contract):
    """How fast a recipe trains, and where the time goes."""

    version: Literal[1] = VERSION
    recipe: str
    settings: tuple[str, ...] = Field(description="keys that were replaced")
    plan: str
    impl: str = Field(description="auto, or reference for every operator's plain torch")
    device: str
    gpus: int = Field(ge=1)
    examples_a_rank: int = Field(ge=1)
    parts: int = Field(ge=1, description="micro-batches that a batch is run in")
    events_a_rank: tuple[int, ...] = Field(description="events of each batch that was used")
    steps: int = Field(ge=1, description="timed steps")
    step_ms: Milliseconds = Field(description="median of the timed steps")
    step_ms_fastest: Milliseconds
    step_ms_slowest: Milliseconds
    examples_per_s: float
    flops_a_step: Flops = Field(description="of the model, over all ranks, nothing twice")
    flops_attention: Flops = Field(description="of it, scores and what they weigh")
    flops_products: Flops = Field(description="of it, all other products: MLPs and projections")
    efficiency: Efficiency
    sections_ms: dict[str, Milliseconds] = Field(description="mean of the timed steps")
    profile: Profile | None = Field(description="null where no step was profiled")
    host_gap_ms: Milliseconds | None = Field(
        description="what a timed step took beyond the work of a profiled one: host gaps without "
        "what the profiler adds; null where none was profiled"
    )
    memory: StepMemory
    held_bytes: Bytes | None = Field(description="allocated after the first steps")
    loss_first: float
    loss_last: float
    left_out: str
    provenance: dict[str, Any] = Field(description="commit, versions, when")
