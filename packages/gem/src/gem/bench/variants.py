"""What `gem bench ablation` changes in a recipe: each element of the model, one at a time.

A variant is a name and the settings that make it, so that anybody can train it alone with
``gem train RECIPE --set ...``. Imports no torch.
"""

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gem.config import RunConfig, parse_recipe, recipe_text
from gem.model.model_presets import shipped_presets
from gem.model.spec import GemSpec
from gem_opkit.errors import ConfigError, UnsupportedError, refusal

BASE = "base"
# Of the block that "block" tries: histories of small logs are shorter than the usual 64.
_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """One line of the table.

    Attributes:
        name: unique among the variants of a recipe.
        element: what of the model it is about.
        settings: ``KEY=VALUE`` texts over the recipe.
    """

    name: str
    element: str
    settings: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Name of the folder of its runs: the letters and digits of its own."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-").lower()


def variants_of(config: RunConfig) -> list[Variant]:
    """List the variants of a recipe: the recipe itself, one for each change, published models.

    Args:
        config: of the hybrid model.

    Returns:
        the recipe first; changes that would change nothing are left out.

    Raises:
        UnsupportedError: a model of another kind.
    """
    spec = config.model
    if not isinstance(spec, GemSpec):
        raise UnsupportedError(
            refusal(
                "gem bench ablation",
                "model.kind",
                must='be "gem", whose elements can be switched',
                got=repr(spec.kind),
                fix="take a recipe of the hybrid model, or --variants FILE",
            )
        )
    found = [Variant(BASE, BASE)]
    if config.data.streams != {}:
        found += _of_streams(spec)
        streams = sorted(config.data.streams or ())
        if len(streams) > 1:
            wider = 2 * spec.stream_spec(streams[0]).width
            settings = (f"model.streams.{streams[0]}.width={wider}",)
            found.append(Variant(f"{streams[0]} twice as wide", "per-stream settings", settings))
    found += _of_layers(spec)
    for count in (1, 2, 4):
        if count != spec.experts.count and len(spec.experts.kinds) == 1:
            name = f"{count} expert" + ("s" if count > 1 else "")
            found.append(Variant(name, "experts", (f"model.experts.count={count}",)))
    if spec.heads.domain_outputs:
        settings = ("model.heads.domain_outputs=false",)
        found.append(Variant("one head for all domains", "domain heads", settings))
    if config.data.synthetic is not None and config.data.synthetic.content_width:
        settings = ('model.leave_out=["content_*", "*.content_*"]',)
        found.append(Variant("without content features", "content features", settings))
    text = config.to_toml()
    for name in shipped_presets():
        settings = (f"model.preset={name}",)
        try:
            other = parse_recipe(text, name=config.name, origin=config.name, overrides=settings)
        except ConfigError:
            if spec.user_model is not None:  # one that reads a candidate is no model of users
                continue
            other = None  # a stream names a layer that it has not; told where it is trained
        if other != config:
            found.append(Variant(name, "published model", settings))
    return found


def _of_streams(spec: GemSpec) -> list[Variant]:
    own = spec.stream
    found: list[Variant] = []

    def add(name: str, element: str, *settings: str) -> None:
        found.append(Variant(name, element, tuple(f"model.stream.{s}" for s in settings)))

    if own.ffn == "gdpa":
        add("without GDPA-PFFN", "GDPA-PFFN", "ffn=none")
    if own.summary_tokens:
        for pooling in ("hsp", "pma", "mean"):
            if pooling != own.pooling:
                add(f"{pooling} pooling", "pooling", f"pooling={pooling}")
    add("two latest events as tokens", "pooling", f"recent_tokens={own.recent_tokens + 2}")
    if set(spec.layers) - {"interaction"}:
        for pattern in ("window", "block", "full"):
            if pattern != own.pattern:
                size = (f"block_tokens={_BLOCK_TOKENS}",) if pattern == "block" else ()
                add(f"{pattern} self-attention", "self-attention", f"pattern={pattern}", *size)
        for rotary in ("rote", "position", "none"):
            if rotary != own.rotary:
                add(f"rotary {rotary}", "rotation", f"rotary={rotary}")
        if not own.ffn_hidden:
            add("MLP behind self-attention", "self-attention", f"ffn_hidden={2 * own.width}")
    if own.target_tokens:
        if own.summary_tokens + own.recent_tokens:
            add("without target attention", "target attention", "target_tokens=0")
        if own.target_attention == "softmax" and own.target_tokens == 1:
            add("DIN's target attention", "target attention", "target_attention=din")
    return found


def _of_layers(spec: GemSpec) -> list[Variant]:
    found: list[Variant] = []

    def add(name: str, element: str, layers: Iterable[str], *more: str) -> None:
        listed = ", ".join(f'"{kind}"' for kind in layers)
        found.append(Variant(name, element, (f"model.layers=[{listed}]", *more)))

    if set(spec.layers) != {"both"}:
        add("without computation skip", "computation skip", ["both"] * len(spec.layers))
    if len(spec.layers) > 1 and spec.layers[-1] != "transformer":
        # Streams that name their layers take part in the one that is left.
        moved: list[str] = []
        for key, own in (
            ("stream", spec.stream),
            *((f"streams.{n}", s) for n, s in spec.streams.items()),
        ):
            moved += [f"model.{key}.full_layers=[]"] if own.full_layers else []
            moved += [f"model.{key}.layers=[0]"] if own.layers else []
        add("last layer alone", "layers", spec.layers[-1:], *moved)
    add("twice the layers", "layers", spec.layers * 2)
    return found


def read_variants(path: Path) -> list[Variant]:
    """Read variants of one's own.

    Args:
        path: TOML: ``[variants]`` with a name for each and an array of ``KEY=VALUE`` texts.

    Returns:
        the recipe itself, then those of the file in its order.

    Raises:
        ConfigError: no such file, or another content.
    """
    if not path.is_file():
        raise ConfigError(
            refusal(
                "gem bench ablation",
                "--variants",
                must="be a file",
                got=str(path),
                fix="check the path",
            )
        )
    try:
        table = tomllib.loads(recipe_text(path)).get("variants")
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{path}: file must be TOML; got {fault}; mend that line") from None
    fits = isinstance(table, dict) and all(
        isinstance(settings, list) and all(isinstance(text, str) for text in settings)
        for settings in table.values()
    )
    if not fits or not table or BASE in table:
        raise ConfigError(
            refusal(
                str(path),
                "variants",
                must=f'be a table of names, none of them "{BASE}", with arrays of KEY=VALUE texts',
                got=repr(table)[:80],
                fix='write [variants] and lines such as "wide" = ["model.width=32"]',
            )
        )
    own = [Variant(name, "", tuple(settings)) for name, settings in table.items()]
    taken = {BASE}
    for variant in own:
        if not variant.folder or variant.folder in taken:
            raise ConfigError(
                refusal(
                    str(path),
                    "variants",
                    must="have names that differ in letters or digits, as their folders do",
                    got=repr(variant.name),
                    fix="rename it",
                )
            )
        if "|" in variant.name or not variant.name.isprintable():
            raise ConfigError(
                refusal(
                    str(path),
                    "variants",
                    must='have names in one line without "|", as they are cells of a table',
                    got=repr(variant.name),
                    fix="rename it",
                )
            )
        taken.add(variant.folder)
    return [Variant(BASE, BASE), *own]


def chosen(variants: Sequence[Variant], only: Sequence[str]) -> list[Variant]:
    """Keep some variants, and the recipe itself.

    Args:
        variants: all of them.
        only: names or elements; none for all.

    Returns:
        those that are meant, in order.

    Raises:
        ConfigError: a name that is none.
    """
    known = {v.name for v in variants} | {v.element for v in variants if v.element}
    unknown = sorted(set(only) - known)
    if unknown:
        raise ConfigError(
            refusal(
                "gem bench ablation",
                "--only",
                must=f"name variants or elements ({', '.join(sorted(known))})",
                got=", ".join(unknown),
                fix="correct the name",
            )
        )
    return [v for v in variants if not only or v.name == BASE or {v.name, v.element} & set(only)]
