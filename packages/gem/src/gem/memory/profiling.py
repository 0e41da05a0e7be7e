"""What a model of a recipe keeps for its backward pass, region by region, without running it.

The model is built and run in name (`gem_parallel.dry_run.fakes`) on the device that will train it,
so that every operator is the one that will run; or on a CPU as if on a GPU, for a forecast.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gem.config import RunConfig
from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.dry_run.count import as_on_a_gpu, batch_without_memory, drawn_in_order
from gem.memory.regions import memory_regions
from gem.model.build import build_model
from gem_parallel.dry_run.fakes import FloatsInName
from gem_parallel.recompute.packing import Packing
from gem_parallel.recompute.profile import Profile
from gem_parallel.recompute.record import record
from gem_precision.layers import Projection, apply_recipe


def profile_of(
    config: RunConfig,
    schema: BatchSchema,
    batch: ExampleBatch,
    *,
    packing: Packing | None = None,
    as_gpu: bool = False,
    count_weights: bool = True,
) -> Profile:
    """Write down what the forward pass of a batch keeps.

    Args:
        config: the run; its plan of ranks changes nothing but who holds which expert.
        schema: of the batch.
        batch: that one forward pass gets, on the device that trains.
        packing: shortens what is kept, from ``memory.pack_above_bytes`` up.
        as_gpu: on a CPU, take the operators that a GPU would.
        count_weights: count copies of weights in bf16, which every forward pass makes under
            autocast; False where it reads copies that are there between steps.

    Returns:
        the profile.
    """
    device = batch.labels_BA.device
    mode = FloatsInName()
    with as_on_a_gpu() if as_gpu else nullcontext(), mode:
        with torch.device(device):
            model = build_model(drawn_in_order(config).model, schema, seed=config.seed)
        model.train()
        named = batch_without_memory(batch, mode)
        precision = apply_recipe(config.precision, device.type)

        copies = {} if count_weights else _copies(model)

        def run() -> None:
            with precision():
                functional_call(model, copies, (named,))

        return record(
            model,
            memory_regions(model),
            run,
            alive=[*batch_tensors(named), *copies.values()],
            packing=packing,
            pack_above_bytes=config.memory.pack_above_bytes,
        )


def _copies(model: nn.Module) -> dict[str, Tensor]:
    """What a step that has bf16 copies of the weights of projections reads in their place."""
    return {
        f"{name}.weight": part.weight.detach().bfloat16().requires_grad_()
        for name, part in model.named_modules()
        if isinstance(part, Projection)
    }


def batch_tensors(batch: ExampleBatch) -> Iterator[Tensor]:
    """All tensors of a batch.

    Args:
        batch: any.

    Yields:
        them.
    """
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            yield value
    for ids in batch.ids.values():
        yield from (ids.values, ids.offsets_O)
    for stream in batch.streams.values():
        for part in (*stream.ids.values(), stream.numbers, stream.gap_seconds):
            yield from (part.values, part.offsets_O)
