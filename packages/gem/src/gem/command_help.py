"""Commands as typer makes them, with help that flows and an unknown command named at once."""

import difflib
from typing import Any

from typer.core import TyperCommand, TyperGroup

from gem_opkit.errors import ConfigError, refusal


class Command(TyperCommand):
    """A command whose help is set in paragraphs, not in the lines of its docstring."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.help = _flowing(self.help)

    def get_help_option(self, ctx: Any) -> Any:
        """The option --help, which takes no value: its type is not shown."""
        return _without_type(super().get_help_option(ctx))


class Commands(TyperGroup):
    """Commands of which an unknown one is refused with the nearest known one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first word names."""
        word = args[0]
        if word not in self.commands and not word.startswith("-") and not ctx.resilient_parsing:
            close = difflib.get_close_matches(word, list(self.commands), n=1, cutoff=0.5)
            raise ConfigError(
                refusal(
                    ctx.command_path,
                    "COMMAND",
                    must=f"be one of {', '.join(self.commands)}",
                    got=repr(word),
                    fix=f"did you mean {close[0]}?" if close else f"see {ctx.command_path} --help",
                )
            )
        return super().resolve_command(ctx, args)

    def get_help_option(self, ctx: Any) -> Any:
        """The option --help, which takes no value: its type is not shown."""
        return _without_type(super().get_help_option(ctx))


def _flowing(text: str | None) -> str | None:
    """Join the lines of each paragraph: the width of a terminal is not that of a docstring."""
    if text is None:
        return None
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _without_type(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option
