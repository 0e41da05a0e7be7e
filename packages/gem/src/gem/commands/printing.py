"""What commands print: text for a person, or one JSON document."""

import json
import os
from typing import Any

import typer


def console_of(*, as_json: bool) -> Any:
    """A console for a person: stdout, or stderr where a document goes to stdout."""
    from rich.console import Console

    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 10_000  # a file or a pipe has no edge: what is searched for is one line
    return console


def say_line(console: Any, text: str) -> None:
    """Print a line as it is: names and paths may hold what rich takes for its markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_json(content: dict[str, Any]) -> None:
    """Print a document, once for all ranks."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps(content, indent=2))
