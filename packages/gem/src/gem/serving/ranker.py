"""A trained model that scores: one user and many candidates a request.

    ranker = Ranker.load(Path("artefact"))
    answer = ranker.score({"user": 17, "candidates": {"item_id": [3, 5, 8]}, "history": {...}})

What is computed once a request and what once a candidate is in `gem.serving.shared_forward`.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from gem import __version__
from gem.model.build import example_layers, late_layers
from gem.model.heads import probabilities
from gem.serving.manifest import (
    DATA_FOLDER,
    DENSE_FILE,
    STATISTICS_FILE,
    TABLES_FILE,
    ArtefactManifest,
    read_artefact,
)
from gem.serving.request import (
    RequestLimits,
    ScoreAnswer,
    ScoreRequest,
    check_size,
    parse_request,
)
from gem.serving.request_log import Told
from gem.serving.request_reader import RequestReader, ServedBatch, join_served, rows_of_request
from gem.serving.shared_forward import MOST_TOKENS, shared_logits, spread_batch
from gem.serving.sharing import streams_told_apart
from gem.serving.weights import load_tensors, model_with
from gem.train.model_fingerprint import fingerprint_of
from gem_attention.recipes import convert_attention
from gem_opkit.errors import ConfigError, DataError, refusal
from gem_precision.contract import PrecisionRecipe
from gem_precision.layers import apply_recipe
from gem_precision.recipes import convert_layers

Precision = Literal["trained", "fp32", "bf16"]
_RECIPES: dict[str, PrecisionRecipe] = {
    "fp32": PrecisionRecipe(),
    "bf16": PrecisionRecipe(default="bf16_autocast"),
}
# Place among the requests, what the model reads, what else is said of it.
_Group = list[tuple[int, ServedBatch, Told]]


class Ranker:
    """Scores the candidates of requests. Made by `load`; may be used by several threads.

    Attributes:
        manifest: of the artefact.
        limits: how large a request may be.
        device: where the model lies.
        told_apart: streams whose events are computed for each candidate by itself -> from where on.

    Args:
        manifest: of an artefact.
        model: with its weights, in evaluation mode, on the device.
        reader: of requests.
        recipe: number formats of the forward pass.
        device: where the model lies.
        limits: how large a request may be.
        share: compute once a request what is the same for its candidates.
    """

    def __init__(
        self,
        manifest: ArtefactManifest,
        model: nn.Module,
        reader: RequestReader,
        *,
        recipe: PrecisionRecipe,
        device: torch.device,
        limits: RequestLimits,
        share: bool = True,
    ) -> None:
        self.manifest, self.limits, self.device = manifest, limits, device
        self._model, self._reader, self._share = model, reader, share
        self._precision = apply_recipe(recipe, device.type)
        self._reading, self._running = threading.Lock(), threading.Lock()
        names = [stream.name for stream in manifest.inputs.streams]
        apart = {name: streams_told_apart(manifest.model, name) for name in names}
        self.told_apart = {name: why for name, why in apart.items() if why is not None}

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        precision: Precision | PrecisionRecipe = "trained",
        device: torch.device | str = "cpu",
        limits: RequestLimits | None = None,
        share: bool = True,
        threads: int | None = None,
    ) -> "Ranker":
        """Load an artefact.

        Args:
            folder: that `gem export` wrote.
            precision: "trained", the recipe's own formats; "fp32"; "bf16", matrix products in
                bfloat16; or a recipe, as for single layers in FP8 where the device has it.
            device: where the model shall lie.
            limits: how large a request may be; none: the defaults.
            share: False gives each candidate a history of its own, as training does: the same
                scores to rounding, at the cost of it.
            threads: of torch in this process, from now on; none: as they are.

        Returns:
            the ranker.

        Raises:
            DataError: no artefact there, of another version, or a file is not what was written.
            UnsupportedError: a format that the device lacks.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        device = _device(device)
        manifest = read_artefact(folder, version=__version__)
        tensors = load_tensors(folder / DENSE_FILE) | load_tensors(folder / TABLES_FILE)
        model = model_with(manifest.model, manifest.inputs, tensors)
        if (found := fingerprint_of(model)) != manifest.fingerprint:
            raise DataError(
                refusal(
                    "artefact",
                    "weights",
                    must=f"have the fingerprint {manifest.fingerprint[:12]} of the manifest",
                    got=found[:12],
                    fix="export it again",
                )
            )
        arrays = load_tensors(folder / STATISTICS_FILE)
        statistics = {name: tensor.numpy() for name, tensor in arrays.items()}
        reader = RequestReader(manifest, folder / DATA_FOLDER, statistics, share=share)
        recipe = precision
        if not isinstance(recipe, PrecisionRecipe):
            recipe = manifest.precision if recipe == "trained" else _RECIPES[recipe]
        limits = limits or RequestLimits()
        model = model.to(device)
        convert_layers(
            model,
            recipe,
            device=device,
            escapes=late_layers(model),
            most_rows=dict.fromkeys(example_layers(model), limits.max_candidates),
        )
        convert_attention(model, recipe, device=device, escapes=late_layers(model))
        return cls(
            manifest, model, reader, recipe=recipe, device=device, limits=limits, share=share
        )

    def score(self, request: ScoreRequest | Mapping[str, Any] | bytes | str) -> ScoreAnswer:
        """Score the candidates of one request.

        Args:
            request: a request, the same as a dict, or as JSON.

        Returns:
            one probability for each task and candidate, in their order.

        Raises:
            RequestError: it is malformed, too large, or for another model.
        """
        answer = self.score_many([self.parse(request)])[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def parse(self, request: ScoreRequest | Mapping[str, Any] | bytes | str) -> ScoreRequest:
        """Check the form and the size of a request.

        Args:
            request: as for `score`.

        Returns:
            the request.

        Raises:
            RequestError: it is malformed or too large.
        """
        if not isinstance(request, ScoreRequest):
            request = parse_request(request)
        check_size(request, self.limits)
        return request

    def score_many(self, requests: Sequence[ScoreRequest]) -> list[ScoreAnswer | Exception]:
        """Score several requests in one forward pass.

        Args:
            requests: of `parse`.

        Returns:
            for each its answer, or the fault for which there is none: a `RequestError` where it is
            the request's, anything else where it is not, such as too little memory. The fault of
            one does not spoil the others.
        """
        found: list[ScoreAnswer | Exception] = []
        read: _Group = []
        for place, request in enumerate(requests):
            try:
                served, told = self._read(request)
            except Exception as fault:  # noqa: BLE001 - handed to who asked
                found.append(fault)
                continue
            found.append(self._answer(told, [[] for _ in self.manifest.inputs.labels]))
            if told.rows:
                read.append((place, served, told))
        for group in self._groups(read):
            for place, answer in self._scored(group):
                found[place] = answer
        return found

    def _scored(self, group: _Group) -> list[tuple[int, ScoreAnswer | Exception]]:
        """Answers of requests that are run together: place and answer of each."""
        try:
            p_NA = self._run(join_served([served for _, served, _ in group]))
            parts = p_NA.split([told.rows for _, _, told in group])
            return [
                (place, self._answer(told, p_MA.t().tolist()))
                for (place, _, told), p_MA in zip(group, parts, strict=True)
            ]
        except Exception as fault:  # noqa: BLE001 - handed to who asked
            if len(group) == 1:
                return [(group[0][0], fault)]
        # One of them failed, or all of them are too much at once: each by itself.
        return [answer for one in group for answer in self._scored([one])]

    def _read(self, request: ScoreRequest) -> tuple[ServedBatch, Told]:
        now = int(time.time() * 1000) if request.time_ms is None else request.time_ms
        with self._reading:
            return self._reader.read(request, now)

    def _answer(self, told: Told, columns: list[list[float]]) -> ScoreAnswer:
        return ScoreAnswer(
            scores=dict(zip(self.manifest.inputs.labels, columns, strict=True)),
            fingerprint=self.manifest.fingerprint,
            unknown=dict(told.unknown),
            missing=told.missing,
        )

    def _tokens(self, served: ServedBatch) -> int:
        """Event tokens that lie side by side in the pass."""
        rows = served.batch.examples
        total = served.batch.event_tokens
        for name, stream in served.shared.items():
            once = self._share and name not in self.told_apart
            total += stream.numbers.total_tokens * (1 if once else rows)
        return total

    def _groups(self, read: _Group) -> list[_Group]:
        """Requests that are run together: as many as memory is meant for, at least one."""
        groups: list[_Group] = []
        room = 0
        for one in read:
            tokens = self._tokens(one[1])
            if not groups or tokens > room:
                groups.append([])
                room = MOST_TOKENS
            groups[-1].append(one)
            room -= tokens
        return groups

    def _run(self, served: ServedBatch) -> torch.Tensor:
        """Probabilities of candidates, float32 (N, A), on the CPU."""
        parts = [served]
        if len(served.counts) == 1 and (tokens := self._tokens(served)) > MOST_TOKENS:
            rows = served.counts[0]
            step = max(1, rows * MOST_TOKENS // tokens)
            cuts = range(0, rows, step)
            parts = [rows_of_request(served, low, min(low + step, rows)) for low in cuts]
        with self._running, torch.inference_mode(), self._precision():
            found = [self._logits(part.to(self.device)) for part in parts]
        return probabilities(torch.cat(found)).cpu()

    def _logits(self, served: ServedBatch) -> torch.Tensor:
        if self._share:
            return shared_logits(self._model, served)
        return self._model(spread_batch(served))


def precision_named(word: str) -> Precision:
    """A word of a command line as a precision.

    Args:
        word: as given.

    Raises:
        ConfigError: it is none.
    """
    if word not in get_args(Precision):
        raise ConfigError(
            refusal(
                "gem",
                "--precision",
                must=f"be one of {', '.join(get_args(Precision))}",
                got=repr(word),
                fix="correct it",
            )
        )
    return cast(Precision, word)


def _device(word: torch.device | str) -> torch.device:
    try:
        device = torch.device(word)
        there = device.type == "cpu" or (
            device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
        )
    except RuntimeError:
        there = False
    if not there:
        raise ConfigError(
            refusal(
                "gem",
                "--device",
                must=f"be cpu, or one of the {torch.cuda.device_count()} GPUs here",
                got=repr(str(word)),
                fix="use cpu",
            )
        )
    return torch.device(word)
