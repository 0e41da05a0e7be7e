"""Commands that measure how fast a recipe trains, and what each element of it is worth."""

import os
from pathlib import Path
from typing import Annotated

import typer

from gem.commands.arguments import (
    JsonFlag,
    RankBatch,
    RecipeArgument,
    RowsOption,
    RunsAtOnce,
    SetOption,
)
from gem.commands.ending import end_early, refuse_ranks, terminated_cleanly
from gem.commands.printing import console_of, print_json, say_line


def bench_step_of(  # noqa: PLR0913 - each is an option of the command
    context: typer.Context,
    recipe: RecipeArgument,
    settings: SetOption = None,
    plan_axes: Annotated[
        list[str] | None,
        typer.Option(
            "--plan",
            metavar="AXIS=SIZE",
            help="Axis of the plan of several ranks, as in shard=2; may be repeated.",
        ),
    ] = None,
    examples: RankBatch = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps to time.")] = 20,
    warmup: Annotated[int, typer.Option(metavar="N", min=1, help="Steps before them.")] = 4,
    profiled: Annotated[
        int,
        typer.Option("--profile", metavar="N", min=0, help="Steps to profile; 0 for none."),
    ] = 3,
    impl: Annotated[
        str,
        typer.Option(
            "--impl",
            metavar="IMPL",
            help="What computes: auto, or reference for plain torch in place of every kernel.",
        ),
    ] = "auto",
    check: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="In place of timing: train N steps with the kernels and with the references, and "
            "compare losses and NE; exit code 1 where they differ by more than roundings do.",
        ),
    ] = None,
    endure: Annotated[
        int,
        typer.Option(
            "--endure",
            metavar="N",
            min=0,
            help="With --check: N steps more with the kernels, whose losses have to be finite; "
            "by itself: N steps of that alone, in place of timing.",
        ),
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON document to write.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture of the step to write.")
    ] = None,
    rows: RowsOption = None,
    *,
    device_batches: Annotated[
        bool,
        typer.Option(
            "--device-batches",
            help="Time steps on batches that lie on the device; else each is copied there from "
            "page-locked host memory while the step before it runs.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Time the training step of a recipe, and say where its time, FLOPs and memory go.

    The trainer's own step runs on random batches; no data set is read. Time is told by kind of work
    and by module, and adds up to the step; MFU is n/a on a device whose peak is not known, as that
    of a CPU. docs/performance.md says how it is measured. To measure several ranks:

    torchrun --nproc-per-node N -m gem bench step RECIPE --plan shard=N
    """
    from gem.bench.command import (
        asked_for,
        bench_check,
        bench_endure,
        bench_step,
        check_text,
        endured_text,
        refuse_mixed,
    )
    from gem.bench.page import as_text

    timing: dict[str, tuple[str, object]] = {
        "out": ("--out", out),
        "svg": ("--svg", svg),
        "steps": ("--steps", steps),
        "warmup": ("--warmup", warmup),
        "profiled": ("--profile", profiled),
        "device_batches": ("--device-batches", "on"),
    }
    # By its name: typer brings its own copy of click's sources in some versions.
    given = [n for n in timing if "DEFAULT" not in str(context.get_parameter_source(n))]
    refuse_mixed(check, endure=endure, given=dict(timing[n] for n in given))
    asked = asked_for(
        recipe,
        settings=settings or (),
        plan=plan_axes or (),
        examples=examples,
        steps=check or endure or steps,
        warmup=warmup,
        profiled=profiled,
        impl=impl,
        batches="device" if device_batches else "host",
    )
    console = console_of(as_json=True)

    def told(stage: str) -> None:
        say_line(console, stage)

    if check is not None:
        compared = bench_check(asked, further=endure, rows=rows, told=told)
        if as_json:
            print_json(compared.model_dump(mode="json"))
        else:
            typer.echo(check_text(compared), nl=False)
        raise typer.Exit(0 if compared.agrees else 1)
    if endure:
        endured = bench_endure(asked, rows=rows, told=told)
        if as_json:
            print_json(endured.model_dump(mode="json"))
        elif os.environ.get("RANK", "0") == "0":
            typer.echo(endured_text(endured), nl=False)
        raise typer.Exit(0 if endured.finite else 1)
    report = bench_step(asked, out=out, svg=svg, rows=rows, told=told)
    if report is None:
        return
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        typer.echo(as_text(report), nl=False)


def bench_ablation_of(  # noqa: PLR0913 - each is an option of the command
    recipe: RecipeArgument,
    settings: SetOption = None,
    seeds: Annotated[str, typer.Option(metavar="N,N", help="Seeds of every variant.")] = "1,2,3",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="NAME", help="Variant or element to train; may be repeated."
        ),
    ] = None,
    variants: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file of variants in place of the built-in ones."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the runs; default runs/ablation/<recipe>."),
    ] = None,
    rows: RowsOption = None,
    jobs: RunsAtOnce = 1,
    *,
    finished: Annotated[
        bool, typer.Option("--finished", metavar="", help="Compare what is trained already.")
    ] = False,
    listed: Annotated[
        bool, typer.Option("--list", metavar="", help="Show the variants; train nothing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a recipe without each of its elements, and published models, and compare them.

    One table: NE, AUC, FLOPs an example, examples/s, and the difference of NE to the recipe on the
    same test rows with its 95 % interval (paired bootstrap). Finished runs are kept: the command
    goes on where it ended. Speed is measured beside as many runs as --jobs says.
    """
    from gem.bench.variants import chosen, read_variants, variants_of
    from gem.config import load_recipe

    config = load_recipe(recipe, settings or ())
    known = variants_of(config) if variants is None else read_variants(variants)
    picked = chosen(known, only or ())
    if listed:
        for variant in picked:
            typer.echo(f"{variant.name}: {', '.join(variant.settings) or 'as the recipe is'}")
        return
    from gem.bench.ablation import (
        Ablation,
        compared,
        run_ablation,
        seeds_of,
        table,
        write_ablation,
    )
    from gem.train.interrupt import Interrupted

    if jobs > 1:
        refuse_ranks("gem bench ablation", "--jobs", "leave torchrun or --jobs out")
    folder = out if out is not None else Path("runs") / "ablation" / config.name
    console = console_of(as_json=True)
    asked = Ablation(
        recipe, tuple(picked), tuple(settings or ()), seeds_of(seeds), folder, jobs=jobs
    )
    try:
        with terminated_cleanly("runs that have ended are kept"):
            make = compared if finished else run_ablation
            found = make(asked, lambda line: say_line(console, line))
    except Interrupted as stop:
        end_early(f"a run stopped after step {stop.step}", stop.reason, more=())
    if os.environ.get("RANK", "0") != "0":
        return
    write_ablation(found, folder, rows)
    if as_json:
        print_json({"rows": found})
    else:
        typer.echo(table(found), nl=False)
