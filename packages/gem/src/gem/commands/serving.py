"""Commands that make an artefact of a run, and answer requests from it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gem.commands.arguments import JsonFlag, LastFlag, RunArgument
from gem.commands.ending import refuse_ranks, terminated_cleanly
from gem.commands.printing import console_of, print_json, say_line
from gem.quick_exit import interrupts_end_at_once


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(metavar="ARTEFACT", help="New folder for the artefact.")],
    example: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write a request as JSON, made of the first row after the training rows; it "
            "holds the history of a user.",
        ),
    ] = None,
    *,
    last: LastFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a trained model as a folder that scores without the run and without the log.

    It holds the weights, the tables, the static features of users and items, and what the
    statistics held at the end of training; not the histories, which come with each request. Load it
    with gem score, gem serve or gem.serving.ranker.Ranker.
    """
    with interrupts_end_at_once():
        from gem.serving.example import write_example
        from gem.serving.export import export as export_run

    refuse_ranks("gem export", "RUN", "leave torchrun out")
    with terminated_cleanly():
        if example is not None:
            write_example(run, example)
        try:
            found = export_run(run, out, averaged=not last)
        except BaseException:
            if example is not None:  # it would be in the way of the next attempt
                example.unlink(missing_ok=True)
            raise
    if as_json:
        print_json({"folder": str(out)} | found.model_dump(mode="json", exclude={"files"}))
        return
    size = sum(facts.bytes for facts in found.files.values())
    text = f"{out}: {size:,} bytes, after {found.steps} steps of {found.recipe}"
    state = "" if found.finished else ", which was not finished"
    say_line(console_of(as_json=False), f"{text}{state}; fingerprint {found.fingerprint[:12]}")


_Artefact = Annotated[
    Path, typer.Argument(metavar="ARTEFACT", help="Folder that gem export wrote.")
]


_Formats = Annotated[
    str,
    typer.Option(
        metavar="FORMAT",
        help="trained, the number formats of the recipe; fp32; or bf16.",
    ),
]


_Device = Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:N.")]


def score(
    artefact: _Artefact,
    request: Annotated[
        Path, typer.Argument(metavar="FILE", help="A request as JSON; - reads it from stdin.")
    ],
    precision: _Formats = "trained",
    device: _Device = "cpu",
) -> None:
    """Score one request: prints the answer that gem serve would give, as JSON."""
    from gem.serving.ranker import Ranker, precision_named

    body = sys.stdin.buffer.read() if str(request) == "-" else request.read_bytes()
    ranker = Ranker.load(artefact, precision=precision_named(precision), device=device)
    typer.echo(ranker.score(body).model_dump_json(indent=2))


def serve(
    artefact: _Artefact,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65_535, help="0 takes any free one.")
    ] = 8000,
    precision: _Formats = "trained",
    device: _Device = "cpu",
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Threads of torch; default: its own.")
    ] = None,
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=VALUE",
            help="One of max_candidates, max_events, max_values, max_body_bytes, max_waiting, "
            "max_batch and max_wait_ms; may be repeated.",
        ),
    ] = None,
) -> None:
    """Serve an artefact over HTTP: POST /score, GET /health, /metadata and /schema.

    Needs the extra "serve" of gem-trainer. A request that finds the line full is refused at once.
    SIGTERM ends it once the answers under way are given.
    """
    with interrupts_end_at_once():
        from gem.serving.limits import limits_named
        from gem.serving.ranker import Ranker, precision_named
        from gem.serving.server import serve as serve_ranker

        sizes, spec = limits_named(limits or (), host=host, port=port)
        ranker = Ranker.load(
            artefact,
            precision=precision_named(precision),
            device=device,
            limits=sizes,
            threads=threads,
        )
    for stream, why in ranker.told_apart.items():
        typer.echo(f"stream {stream} is computed for each candidate from {why}", err=True)
    serve_ranker(ranker, spec, told=lambda at: typer.echo(f"serving {artefact} at {at}", err=True))


def export_items_of(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run of a model of users.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Parquet file to write.")],
) -> None:
    """Write the vectors of all items, by which the embeddings of users are compared with them.

    Their dot product with a user's embedding of the same run is the score of the item as that
    user's next one.
    """
    with interrupts_end_at_once():
        from gem.serving.items import export_items

    refuse_ranks("gem export-items", "RUN", "leave torchrun out")
    with terminated_cleanly():
        found = export_items(run, out)
    text = f"{len(found.keys):,} items in {out}; fingerprint {found.fingerprint[:12]}"
    say_line(console_of(as_json=False), text)


def nearest(
    users: Annotated[
        Path,
        typer.Argument(metavar="USERS", help="Folder that gem predict --embeddings wrote."),
    ],
    items: Annotated[
        Path, typer.Argument(metavar="ITEMS", help="File that gem export-items wrote.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Parquet file to write.")],
    count: Annotated[int, typer.Option(metavar="K", min=1, help="Neighbours of each user.")] = 100,
    method: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="exact, by comparing all; or by faiss: flat, hnsw or ivf, which need the extra "
            "retrieval of gem-trainer.",
        ),
    ] = "exact",
    effort: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Items looked at by hnsw, clusters looked into by ivf."
        ),
    ] = 64,
    *,
    recall: Annotated[
        bool,
        typer.Option("--recall", metavar="", help="Also search exactly, and say how many agree."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Find the items nearest to each user, by the greatest dot product of their vectors."""
    from gem.serving.retrieval import search_named, write_nearest

    spec = search_named(method, effort)
    found = write_nearest(users, items, out, count=count, spec=spec, with_recall=recall)
    if as_json:
        print_json(found)
        return
    text = f"{found['count']} items for each of {found['users']:,} users in {out}"
    if recall:
        text += f"; recall {found['recall']:.4f} of the exact search"
    say_line(console_of(as_json=False), text)
