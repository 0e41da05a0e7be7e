"""The part of a report that says what was run: data, model, plan, versions, command."""

from typing import Any

from gem.report import words
from gem.report.read import RunRecord, number, pick, table

Fact = tuple[str, str]


def subtitle(run: RunRecord) -> str:
    """Data set, time and place of a run in a line.

    Args:
        run: to be described.
    """
    parts = [run.dataset]
    if device := run.summary.get("device"):
        ranks = number(run.summary.get("world_size")) or 1
        parts.append(f"{ranks:.0f} × {device}" if ranks > 1 else f"on {device}")
    if took := _took(run):
        parts.append(took)
    if at := pick(run.diagnostics, "process", "starts", 0, "at"):
        parts.append(f"begun {str(at)[:16].replace('T', ' ')} UTC")
    return " · ".join(str(part) for part in parts)


def status(run: RunRecord) -> str:
    """How far a run has come.

    Args:
        run: to be described.
    """
    total = number(run.diagnostics.get("total_steps"))
    steps = f"{words.count(run.step)} of {words.count(total)}" if total else words.count(run.step)
    if run.finished and table(run.summary.get("training")).get("stopped_early"):
        return f"Stopped early, after {steps} steps"
    return f"Finished, {steps} steps" if run.finished else f"Unfinished, at step {steps}"


def _took(run: RunRecord) -> str:
    seconds = [
        v
        for part in table(pick(run.diagnostics, "process", "seconds")).values()
        if (v := number(part)) is not None
    ]
    return f"{words.duration(sum(seconds))} of training" if seconds else ""


def facts(run: RunRecord) -> list[tuple[str, list[Fact]]]:
    """What ran, by subject.

    Args:
        run: to be described.

    Returns:
        Subject and its facts, each a name and a text; subjects of which nothing is known are
        left out.
    """
    found = [
        ("Run", _run_facts(run)),
        ("Data", _data_facts(run)),
        ("Model", _model_facts(run)),
        ("Training", _training_facts(run)),
        ("Versions", _version_facts(run)),
    ]
    return [(subject, known) for subject, known in found if known]


def _run_facts(run: RunRecord) -> list[Fact]:
    found: list[Fact] = [("recipe", run.recipe)]
    if text := run.config.get("description"):
        found.append(("what it is for", str(text)))
    found += [("seed", run.seed), ("state", status(run)), ("folder", str(run.folder))]
    starts = pick(run.diagnostics, "process", "starts")
    for i, start in enumerate(starts if isinstance(starts, list) else ()):
        at = str(pick(start, "at") or "")[:19].replace("T", " ")
        step = number(pick(start, "step")) or 0
        ranks = number(pick(start, "ranks")) or 1
        name = "command" if i == 0 else f"continued at step {words.count(step)}"
        on = f", on {ranks:.0f} ranks" if ranks > 1 else ""
        found.append((name, f"{pick(start, 'command')} ({at} UTC{on})"))
    return found


def _data_facts(run: RunRecord) -> list[Fact]:
    data = table(run.diagnostics.get("data"))
    found: list[Fact] = [("data set", run.dataset)]
    if text := data.get("description"):
        found.append(("what it holds", str(text)))
    for name, split in table(data.get("splits")).items():
        examples = number(pick(split, "examples"))
        first, last = number(pick(split, "first_ms")), number(pick(split, "last_ms"))
        span = "" if first is None else f", {words.moment(first)} to {words.moment(last)} UTC"
        found.append((f"{name} period", f"{words.count(examples)} examples{span}"))
    for name, label in table(data.get("labels")).items():
        found.append((f"task {name}", str(label) or "no description"))
    if isinstance(domains := data.get("domains"), list) and len(domains) > 1:
        found.append(("domains", ", ".join(str(d) for d in domains)))
    for name, stream in table(data.get("streams")).items():
        most = words.count(number(pick(stream, "max_events")))
        fields = [*(pick(stream, "ids") or ()), *(pick(stream, "numbers") or ())]
        text = f"the newest {most} events; {_listed(fields)}"
        found.append((f"stream {name}", text))
    for kind, name in (("ids", "categorical inputs"), ("numbers", "continuous inputs")):
        if isinstance(inputs := data.get(kind), list):
            found.append((name, _listed(inputs)))
    if text := data.get("terms"):
        found.append(("terms of use", str(text)))
    if run.fingerprint:
        found.append(("fingerprint", run.fingerprint))
    return found


def _listed(names: Any) -> str:
    return f"{len(names)}: {', '.join(str(name) for name in names)}" if names else "none"


def _model_facts(run: RunRecord) -> list[Fact]:
    found: list[Fact] = [("kind", str(pick(run.config, "model", "kind") or "unknown"))]
    counts = table(pick(run.diagnostics, "model", "parameters"))
    for key, name in (("dense", "dense parameters"), ("tables", "parameters in tables")):
        if (value := number(counts.get(key))) is not None:
            found.append((name, words.count(value)))
    parts = [
        f"{name} {words.count(value)}"
        for name, part in table(counts.get("dense_by_part")).items()
        if (value := number(part)) is not None
    ]
    if parts:
        found.append(("dense, by part", ", ".join(parts)))
    layers = pick(run.config, "model", "layers")
    if isinstance(layers, list) and layers:
        found.append(("layers", ", ".join(str(layer) for layer in layers)))
    return found


def _training_facts(run: RunRecord) -> list[Fact]:
    train = table(run.config.get("train"))
    found: list[Fact] = []
    if (batch := number(train.get("batch_examples"))) is not None:
        found.append(("batch", f"{words.count(batch)} examples a step, over all ranks"))
    if (passes := number(train.get("passes"))) is not None:
        once = "1, in time order: every example is scored before it is trained on"
        found.append(("passes over the data", once if passes == 1 else words.count(passes)))
    for key, name in (("dense", "dense optimizer"), ("tables", "table optimizer")):
        optimizer = table(train.get(key))
        lr = number(optimizer.get("lr"))
        if lr is not None:
            kind = str(optimizer.get("kind", "adam")).replace("_", " ")
            found.append((name, f"{kind}, learning rate {lr:.3g}"))
    found += _faults_and_stop(run)
    found.append(("number format", str(pick(run.config, "precision", "default") or "fp32")))
    if (products := pick(run.config, "precision", "recipe")) is not None:
        found.append(("products of linear layers", str(products)))
    plan = table(run.config.get("parallel"))
    sizes = ", ".join(f"{axis} {value}" for axis, value in plan.items())
    found.append(("parallel plan", sizes or "every rank holds a copy of everything"))
    return found


def _faults_and_stop(run: RunRecord) -> list[Fact]:
    """Skipped steps and an early stop, of a finished run that had them."""
    training = table(run.summary.get("training"))
    found: list[Fact] = []
    if steps := number(training.get("skipped_steps")):
        examples = words.count(number(training.get("skipped_examples")))
        found.append(("skipped steps", f"{words.count(steps)}, of {examples} examples"))
    best, ne = number(training.get("best_step")), number(training.get("best_ne"))
    if training.get("stopped_early"):
        text = "no evaluation got better any more"
        if best is not None and ne is not None:
            text = f"{text}; the best was after step {words.count(best)}, NE {ne:.4f}"
        found.append(("stopped early", text))
    return found


def _version_facts(run: RunRecord) -> list[Fact]:
    found = table(pick(run.diagnostics, "process", "starts", -1, "versions"))
    return [(name, str(version)) for name, version in found.items()]
