"""One training step: score the batch, then learn from it.

The probabilities of a step are those of the forward pass before its update, so that recording
them is progressive validation at no cost. With dropout they are those of the thinned network.

On several ranks each rank runs its slice. The loss of a rank is divided by the label weights of
the whole batch, so the sum of the ranks' gradients is the gradient of the whole batch, however
uneven the slices.
"""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gem.config import RunConfig
from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.memory.limit import MemoryLimit
from gem.model.build import (
    dense_units,
    example_layers,
    expert_mixtures,
    late_layers,
    only_multiplies_vectors,
    overlap_sides,
    refuse_cut_sides,
)
from gem.model.gem import GemModel
from gem.model.heads import auxiliary_loss, known_weight, multi_task_loss, probabilities
from gem.model.sharded_tables import ShardedTables
from gem.model.structure import loss_weights
from gem.train.averages import move_averages
from gem.train.clock import StepClock
from gem.train.compiled import compile_regions
from gem.train.dense_adam import DenseAdam, WorkingWeights, dense_optimizer
from gem.train.graphed import graph_regions, refuse_graphs
from gem.train.guard import Fault, Guard, is_finite, norms_are_finite
from gem.train.later_passes import pull_rows, refuse_engine, tables_rest
from gem.train.lookup_ahead import LookupAhead
from gem.train.micro_batches import micro_batches
from gem.train.newton import newton_map
from gem.train.run_plan import plan_of
from gem.train.shared_weights import shares_of
from gem.train.spec import TrainSpec, schedule_factor
from gem.train.table_engine import shard_tables
from gem_attention.recipes import convert_attention
from gem_embeddings.optimizer import merge_sparse_gradients, table_optimizer
from gem_embeddings.tables import EmbeddingTables
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.copy_engine.units import gather_by_copy_engines
from gem_parallel.dense import parallelise
from gem_parallel.launch import World
from gem_precision.gathered import GatheredLayers, gather_layers_in_8_bits
from gem_precision.layers import apply_recipe
from gem_precision.ops import tensor_norms
from gem_precision.recipes import convert_layers


@dataclass(frozen=True, slots=True)
class Scored:
    """What a step leaves behind: device tensors that nothing has waited for.

    Attributes:
        p_BA: probabilities before the update, float32.
        loss: this rank's share of the batch's training loss, a scalar; the shares add up.
        finite: whether that and this rank's gradients are finite, a bool scalar.
        fault: why the weights were left as they were; None where they moved.
        grad_norm: L2 norm of the gradient of all dense weights over all ranks, before it was
            clipped, a scalar; None where nobody needs it.
    """

    p_BA: Tensor
    loss: Tensor
    finite: Tensor
    fault: Fault | None = None
    grad_norm: Tensor | None = None


class TrainStep:
    """The model with its optimizers.

    Args:
        config: the run.
        model: built by `gem.model.build.build_model`, on the world's device.
        schema: of the batches.
        world: the ranks.
        total_steps: steps of the whole run.
        clock: told which section runs.
        guard: says which steps must not move the weights; none: all may.

    Raises:
        ConfigError: a setting names a parameter that the model does not have.
        UnsupportedError: a number format or a parallel plan that is not built.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        schema: BatchSchema,
        world: World,
        *,
        total_steps: int,
        clock: StepClock,
        guard: Guard | None = None,
    ) -> None:
        self.guard = guard
        self.spec: TrainSpec = config.train
        self.model, self.world, self.clock = model, world, clock
        self.total_steps = total_steps
        self.task_weights = loss_weights(config.model, schema)
        self.precision = apply_recipe(config.precision, world.device.type)
        self.low_precision = convert_layers(
            model,
            config.precision,
            device=world.device,
            escapes=late_layers(model),
            # The batch of all ranks: experts may see the examples of several.
            most_rows=dict.fromkeys(example_layers(model), config.train.batch_examples),
        )
        self.low_attention = convert_attention(
            model, config.precision, device=world.device, escapes=late_layers(model)
        )
        self.plan = plan_of(config, world)
        shard_tables(config, self.plan, model, schema, world)
        self.lookups = lookups = cast(
            EmbeddingTables | ShardedTables, model.get_submodule("tables")
        )
        self.engine = lookups.engine if isinstance(lookups, ShardedTables) else None
        parts = self.spec.accumulation_parts
        self.ahead = LookupAhead(model, parts=parts, device=world.device)
        halves = config.precision.formats() == ("bf16_autocast",)
        if self.engine is not None and halves and only_multiplies_vectors(model):
            self.engine.round_vectors()
        self.table_parameters = lookups.table_parameters()
        tables = {id(p) for p in self.table_parameters}
        # Of the whole model: afterwards a rank may have a part of the experts.
        self.sizes = {n: p.numel() for n, p in model.named_parameters() if id(p) not in tables}
        if self.plan.overlap_sides:
            overlap_sides(model, world.device)
        if self.spec.compile != "off":
            compile_regions(model, self.plan, self.spec.compile)
        if self.spec.cuda_graphs:
            refuse_graphs(config, world)
            graph_regions(model)
        self.working: WorkingWeights | None = None
        self.gathered: GatheredLayers | None = None
        if config.precision.gather_in_8_bits:
            formats, shares = self.low_precision.formats, shares_of(self.plan, model)
            self.gathered = gather_layers_in_8_bits(model, formats, parts=shares)
        self.parallel = parallelise(
            model,
            self.plan,
            world,
            units=dense_units(model),
            experts=expert_mixtures(model),
            ignored=self.table_parameters,
            stand_ins=self._stand_ins if self._reads_working_weights(config) else None,
        )
        self.wrapped = self.parallel.module
        if self.plan.overlap_sides:
            refuse_cut_sides(model)
        self.gathers = gather_by_copy_engines(
            self.wrapped,
            world.device,
            way=self.plan.gathers,
            named=("recipe", "parallel.gathers"),
        )
        self.memory = MemoryLimit(config, schema, model, world)
        # Of heads, whose logits are a view. Nothing here writes into what a module gives back.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        self.dense = {n: p for n, p in model.named_parameters() if id(p) not in tables}
        self.newton = newton_map(config, model, self.task_weights, ranks=world.size)
        by_adam = {
            name: p
            for name, p in self.dense.items()
            if self.newton is None or p is not self.newton.weight_AD
        }
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "dense": dense_optimizer(self.spec, by_adam, names=self.sizes)
        }
        if self.newton is not None:
            self.optimizers["newton"] = self.newton
        if self.table_parameters:
            self.optimizers["tables"] = table_optimizer(self.table_parameters, self.spec.tables)
        self._base_lr = {
            name: [group["lr"] for group in optimizer.param_groups]
            for name, optimizer in self.optimizers.items()
        }
        if not world.grouped and self._reads_working_weights(config):
            self.working = WorkingWeights(self.model)
        if self.working is not None:
            cast(DenseAdam, self.optimizers["dense"]).copies = self.working.copies
        self.ema: dict[str, Tensor] = {}
        if self.spec.ema_decay is not None:
            self.ema = {name: p.detach().clone() for name, p in self.dense.items()}
        self._table_lr = self.spec.tables.lr
        refuse_engine(self.spec, has_engine=self.engine is not None)
        # Lookups run inside the model's forward pass; their time is booked under the tables. Those
        # of an evaluation are no time of training.
        lookups.register_forward_pre_hook(lambda module, *_: _mark(clock, module, "tables"))
        lookups.register_forward_hook(lambda module, *_: self._looked_up(module))

    def __call__(self, batch: ExampleBatch, step: int) -> Scored:
        """Score a batch, then learn from it.

        Args:
            batch: this rank's slice, on the world's device; may hold no example.
            step: 0-based step of the run, which decides the learning rates.

        Returns:
            The probabilities, the loss, and whether the weights moved.
        """
        before = self._before() if self.guard is not None and self.guard.decides else None
        logits, loss = self._gradients(batch)
        self.clock.mark("tables")
        if self.world.size > 1:
            merge_sparse_gradients(self.table_parameters, self.world)
        self.clock.mark("optimizer")
        finite, norms = self._finite(loss)
        if self.engine is not None:
            finite = finite & self.engine.held_finite()
        p_BA = probabilities(logits)
        if self.guard is not None and before is not None:
            fault = self.guard.judge(loss, finite)
            if fault is not None:
                if fault.stops:
                    self._restore(*before)
                if self.engine is not None:
                    self.engine.discard()
                if self.newton is not None:
                    self.newton.forget()
                self.clock.mark("other")
                return Scored(p_BA, loss, finite, fault)
        grad_norm = self._update(step, norms)
        self.clock.mark("other")
        return Scored(p_BA, loss, finite, grad_norm=grad_norm)

    def score(self, batch: ExampleBatch) -> Tensor:
        """Probabilities of a batch that nothing is learned from; for a model of one process.

        Args:
            batch: on the device of the step.

        Returns:
            p_BA, float32.
        """
        self.model.eval()
        try:
            with torch.no_grad(), self.precision():
                return probabilities(self.model(batch))
        finally:
            self.model.train()

    def expect(self, batch: ExampleBatch) -> None:
        """Say which batch comes behind the one that is trained next, so that it is looked up ahead.

        What a step computes stays as it is, to the last bit.

        Args:
            batch: of this rank, on the device; made on ``ahead.stream`` or on the current stream.
        """
        self.ahead.expect(batch)

    def _looked_up(self, module: nn.Module) -> None:
        if module.training:
            self.ahead.begin()
            self.clock.mark("forward")

    def _reads_working_weights(self, config: RunConfig) -> bool:
        """Whether forward passes read weights in bf16: on a GPU, where a step uses each once."""
        return (
            self.world.device.type == "cuda"
            and config.precision.formats() == ("bf16_autocast",)
            and self.spec.accumulation_parts == 1  # else gradients would add up in bf16
            # What stands in for weights on several ranks has never met a compiled region.
            and (self.spec.compile == "off" or not self.world.grouped)
        )

    def _stand_ins(self, whole: Mapping[str, nn.Parameter]) -> Mapping[nn.Parameter, Tensor]:
        """On several ranks: of the weights that are whole on this one."""
        self.working = WorkingWeights(self.model, only=set(whole.values()))
        return self.working.copies

    def _finite(self, loss: Tensor) -> tuple[Tensor, list[Tensor] | None]:
        """Whether all is finite; norms of dense gradients, where one pass tells both."""
        if self.newton is not None:
            loss = loss + sum(0.0 * held.sum() for held in self.newton.held())
        if not isinstance(self.optimizers["dense"], DenseAdam):
            return is_finite(loss, [*self.dense.values(), *self.table_parameters]), None
        norms = self.parallel.norms(tensor_norms)
        finite = is_finite(loss, self.table_parameters)
        return (finite & norms_are_finite(norms) if norms else finite), norms

    def _gradients(self, batch: ExampleBatch) -> tuple[Tensor, Tensor]:
        """Logits and loss of a batch, run in parts whose gradients add up."""
        self.clock.mark("forward")
        known_A = all_reduce_sum(known_weight(batch), self.world)
        known_K = self._auxiliary_known(batch)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        logits: list[Tensor] = []
        losses: list[Tensor] = []
        parts = self.spec.accumulation_parts
        for place, part in enumerate(micro_batches(batch, parts), start=1):
            self.clock.mark("forward")
            self.memory.prepare(self.model, part, count_weights=self.working is None)
            self.ahead.use(part)
            # Ranks exchange gradients in the last part alone: they hold the sum by then.
            with self.parallel.no_sync() if place < parts else nullcontext():
                with self.precision():
                    found = (
                        self.wrapped(part)
                        if self.working is None
                        else self.working.forward(self.wrapped, part)
                    )
                # Divided by the weights of the whole batch: the parts' losses add up to its loss.
                logits_BA, sum_K = found if isinstance(found, tuple) else (found, None)
                loss = multi_task_loss(logits_BA, part, self.task_weights, known_A=known_A)
                if sum_K is not None and known_K is not None:
                    loss = loss + auxiliary_loss(sum_K, known_K)
                self.clock.mark("backward")
                # Gradients are averaged over ranks, and what is wanted is their sum.
                (loss * self.world.size).backward()
            logits.append(logits_BA.detach())
            losses.append(loss.detach())
            if self.newton is not None:
                numbers_BD = cast(GemModel, self.model).numbers(part.numbers_BD)
                self.newton.observe(numbers_BD, logits[-1], part)
        if self.working is not None and not self.world.grouped:
            self.working.hand_over()
        if self.newton is not None:
            self.newton.take(known_A)
        if parts == 1:
            return logits[0], losses[0]
        return torch.cat(logits), torch.stack(losses).sum()

    def _auxiliary_known(self, batch: ExampleBatch) -> Tensor | None:
        """Denominators of the losses that a model has of its own, over all ranks."""
        known_K = self.model.auxiliary_known(batch) if isinstance(self.model, GemModel) else None
        return None if known_K is None else all_reduce_sum(known_K, self.world)

    def _update(self, step: int, norms: list[Tensor] | None) -> Tensor | None:
        self.clock.mark("tables")
        self.set_rates(step)
        if "tables" in self.optimizers:
            pull_rows(self.table_parameters, self.spec.row_l2)
            self.optimizers["tables"].step()
        if self.engine is not None:
            self.engine.apply()
            self.engine.sync()
            self.ahead.read()
        self.clock.mark("optimizer")
        if self.newton is not None:
            self.newton.step()
        dense, clip = self.optimizers["dense"], self.spec.clip_norm
        norm: Tensor | None = None
        if clip is not None and not isinstance(dense, DenseAdam):
            norm = self.parallel.clip_(clip)
        elif (
            clip is not None
            or (step + 1) % self.spec.log_every_steps == 0
            or step + 1 == self.total_steps
        ):
            norm = self.parallel.grad_norm(norms)
        if isinstance(dense, DenseAdam) and norm is not None and clip is not None:
            # As torch clips, but in the pass that reads the gradients anyway.
            dense.factor = (clip / (norm + 1e-6)).clamp(max=1.0)
        dense.step()
        if self.working is not None:
            self.working.note_step()
        if self.ema and self.spec.ema_decay is not None:
            move_averages(self.ema, self.dense, self.spec.ema_decay, step)
        return norm

    def _before(self) -> tuple[dict[str, Tensor], Tensor, Any]:
        """What a forward pass changes: random states and the counts of ids."""
        random = {"cpu": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.world.device)
        return random, self.lookups.out_of_range.clone(), self.lookups.counts.mark()

    def _restore(self, random: dict[str, Tensor], out_of_range: Tensor, counts: Any) -> None:
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.world.device)
        self.lookups.out_of_range.copy_(out_of_range)
        self.lookups.counts.return_to(counts)

    def set_rates(self, step: int) -> None:
        """Set the learning rates of a step.

        Args:
            step: 0-based step of the run.
        """
        factor = schedule_factor(self.spec.schedule, step, self.total_steps)
        of_tables = factor if self.spec.schedule.tables else 1.0
        if tables_rest(self.spec, step, self.total_steps):
            of_tables = 0.0
        for name, optimizer in self.optimizers.items():
            scaled = factor if name == "dense" else of_tables
            for group, base in zip(optimizer.param_groups, self._base_lr[name], strict=True):
                group["lr"] = base * scaled
        if self.engine is not None:
            self.engine.set_lr(self._table_lr * of_tables)


def _mark(clock: StepClock, module: nn.Module, section: str) -> None:
    if module.training:
        clock.mark(section)
