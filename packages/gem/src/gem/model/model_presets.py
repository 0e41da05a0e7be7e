"""Published models as settings of the same blocks: the presets that `model.preset` names.

A preset says how a model is built, not how wide it is: widths, tables, heads and all that a preset
does not name stay those of the recipe, so that a comparison is the difference of two configs.
Imports no torch.
"""

import tomllib
from importlib import resources
from typing import Any

from gem_opkit.errors import ConfigError, refusal

PRESET_KEY = "preset"


def shipped_presets() -> dict[str, str]:
    """The presets that come with the package.

    Returns:
        name -> text of the keys below ``[model]``, TOML; sorted by name.
    """
    folder = resources.files("gem") / "model" / "presets"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }


def preset_keys(name: Any, where: str) -> dict[str, Any]:
    """Read a preset.

    Args:
        name: what a recipe gives as ``model.preset``.
        where: who names it, for messages.

    Returns:
        its keys, as below ``[model]``.

    Raises:
        ConfigError: no such preset.
    """
    known = shipped_presets()
    if not isinstance(name, str) or name not in known:
        raise ConfigError(
            refusal(
                where,
                f"model.{PRESET_KEY}",
                must=f"be one of {', '.join(known)}",
                got=repr(name),
                fix="name one of them, or set the model's keys yourself",
            )
        )
    return tomllib.loads(known[name])
