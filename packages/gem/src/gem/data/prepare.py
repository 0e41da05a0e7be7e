"""`gem data prepare`: make a data set by name. `gem.data.check` looks at one."""

import hashlib
import json
from pathlib import Path

from gem.data.dataset import SPEC_FILE, Dataset
from gem.data.declared.load import load_declaration, shipped_declarations
from gem.data.declared.make import write_declared
from gem.data.features import DatasetSpec, DataSpec
from gem.data.grown import check_grown
from gem.data.kuairand import write_kuairand
from gem.data.kuairand_files import known_folder
from gem.data.made_from import refuse_stale
from gem.data.movielens import write_movielens_100k
from gem.data.names import suggestion
from gem.data.synthetic import write_synthetic
from gem.data.synthetic_spec import SyntheticSpec
from gem_opkit.errors import ConfigError, DataError, refusal

NAMES = ("movielens-100k", "kuairand", "synthetic", *shipped_declarations())


def default_folder(data: DataSpec, root: Path) -> Path:
    """Where a recipe's data set lies when the recipe names no folder.

    Args:
        data: the recipe's section.
        root: folder of all data sets.

    Returns:
        `data.folder` where given, else ``root/<name>``; options other than the defaults add a
        short hash, so that data sets made with different options never meet.
    """
    if data.folder is not None:
        return Path(data.folder)
    options = data.synthetic.model_dump(exclude_defaults=True) if data.synthetic else {}
    if not options:
        return root / data.dataset
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
    return root / f"{data.dataset}-{digest}"


def prepare(
    name: str,
    out: Path | str,
    *,
    source: Path | str | None = None,
    options: SyntheticSpec | None = None,
    grown_from: Path | str | None = None,
) -> DatasetSpec:
    """Make a data set, unless it is there already, of the same raw files.

    Args:
        name: one of `NAMES`, or path of a declaration, a TOML file (`gem.data.declared.spec`).
        out: folder of the data set.
        source: folder with the raw files. None: those of `movielens-100k` and `complete-journey`
            are downloaded, those of `kuairand` are in the folder that GEM_KUAIRAND names, those of
            a declaration of one's own beside it.
        options: of the generator, for `synthetic`; none: the defaults.
        grown_from: for a declaration, folder of a data set of the same log at an earlier time: its
            ids keep their meaning, and later ones follow them.

    Returns:
        the contract of the data set.

    Raises:
        ConfigError: an unknown name, or an argument that the data set does not take.
        DataError: raw files are missing or wrong, or `out` holds something else, or what was made
            of files that have changed since.
    """
    out, source = Path(out), None if source is None else Path(source)
    there = (out / SPEC_FILE).is_file()
    before = None if grown_from is None else Path(grown_from)
    spec = _made(name, out, source=source, options=options, grown_from=before)
    if there:
        if name == "kuairand":
            source = known_folder(source)
        elif source is None and name.endswith(".toml"):
            source = Path(name).parent
        refuse_stale(out, source=source)
    return spec


def _made(
    name: str,
    out: Path,
    *,
    source: Path | None,
    options: SyntheticSpec | None,
    grown_from: Path | None = None,
) -> DatasetSpec:
    if name not in NAMES and not name.endswith(".toml"):
        raise ConfigError(
            refusal(
                "gem data prepare",
                "name",
                must=f"be one of {', '.join(NAMES)}",
                got=repr(name) + suggestion(name, NAMES),
                fix="correct the name; a log of your own is made by the TOML file that declares "
                "it, and a recipe reads a data set of your own from data.folder",
            )
        )
    if options is not None and name != "synthetic":
        raise ConfigError(f"gem data prepare: options belong to 'synthetic'; got {name!r}")
    if source is not None and name == "synthetic":
        raise ConfigError("gem data prepare: 'synthetic' is generated and takes no source")
    if name.endswith(".toml") or name in shipped_declarations():
        return _prepare_declared(name, out, source, grown_from)
    if grown_from is not None:
        raise ConfigError(
            refusal(
                "gem data prepare",
                "--grown-from",
                must="come with a log that is declared by a TOML file",
                got=f"{name!r}, which does not grow",
                fix="remove it",
            )
        )
    wanted = (options or SyntheticSpec()).model_dump() if name == "synthetic" else {}
    if (out / SPEC_FILE).is_file():
        return _existing(out, name, wanted)
    if name == "synthetic":
        return write_synthetic(out, options or SyntheticSpec())
    if name == "kuairand":
        return write_kuairand(out, source=source)
    return write_movielens_100k(out, source=source)


def _prepare_declared(
    name: str, out: Path, source: Path | None, grown_from: Path | None
) -> DatasetSpec:
    declaration, digest = load_declaration(name)
    if (out / SPEC_FILE).is_file():
        if grown_from is not None:
            check_grown(Dataset.open(grown_from), Dataset.open(out))
        return _existing(out, declaration.name, {"declaration": digest})
    if source is None and name.endswith(".toml"):
        source = Path(name).parent
    file = Path(name) if name.endswith(".toml") else None
    return write_declared(out, declaration, digest, source=source, file=file, grown_from=grown_from)


def provide(data: DataSpec, root: Path, *, fresh: bool = False) -> DatasetSpec:
    """The data set that a recipe reads: the one in its folder, else one that is made by name.

    Args:
        data: the recipe's section. With a `folder` nothing is made: a mistyped one would be filled
            with other data, and the data set there may be anybody's.
        root: as in `default_folder`.
        fresh: refuse a data set whose raw files have changed since it was made. A run that has
            begun goes on with the rows that it knows.

    Returns:
        the contract of the data set in `default_folder`.

    Raises:
        ConfigError, DataError: as `prepare`, or the folder holds another data set.
    """
    folder = default_folder(data, root)
    if data.folder is None:
        spec = _provide_by_name(data, folder, fresh=fresh)
    else:
        spec = Dataset.open(folder).spec
        if spec.name != data.dataset:
            raise DataError(
                refusal(
                    "gem data",
                    "data.dataset",
                    must=f"be {spec.name!r}, the name of the data set in data.folder = "
                    f"{data.folder}",
                    got=repr(data.dataset),
                    fix="correct it, or name another folder",
                )
            )
        if data.synthetic is not None:
            _need_options(folder, spec, data.synthetic.model_dump())
        if fresh:
            refuse_stale(folder)
    return spec


def _provide_by_name(data: DataSpec, folder: Path, *, fresh: bool) -> DatasetSpec:
    if data.dataset not in NAMES:
        raise ConfigError(
            refusal(
                "gem data",
                "data.dataset",
                must=f"be one of {', '.join(NAMES)}, or the name of the data set in data.folder",
                got=repr(data.dataset) + suggestion(data.dataset, NAMES),
                fix="correct it, or set data.folder and data.dataset to a data set of your own, "
                "made by `gem data prepare LOG.toml`",
            )
        )
    if fresh:
        return prepare(data.dataset, folder, source=data.source, options=data.synthetic)
    source = None if data.source is None else Path(data.source)
    return _made(data.dataset, folder, source=source, options=data.synthetic)


def notice(spec: DatasetSpec) -> str:
    """What a command says about the owner of a data set before it is used.

    Args:
        spec: the contract of the data set.

    Returns:
        terms and citation, one a line; empty where the data set has neither.
    """
    lines = []
    if spec.terms:
        lines.append(f"Terms of {spec.name}: {spec.terms}")
    if spec.citation:
        lines.append(f"Please cite: {spec.citation}")
    return "\n".join(lines)


def _existing(out: Path, name: str, wanted: dict[str, object]) -> DatasetSpec:
    spec = Dataset.open(out).spec
    if spec.name != name:
        raise DataError(
            refusal(
                "gem data prepare",
                "out",
                must=f"be free or hold {name!r}",
                got=f"{out}, which holds {spec.name!r}",
                fix="choose another folder or correct the name",
            )
        )
    _need_options(out, spec, wanted)
    return spec


def _need_options(folder: Path, spec: DatasetSpec, wanted: dict[str, object]) -> None:
    # An option that is newer than the data set is one that it was made without.
    before = SyntheticSpec().model_dump() if spec.name == "synthetic" else {}
    for key, value in wanted.items():
        if spec.options.get(key, before.get(key)) != value:
            raise DataError(
                refusal(
                    "gem data",
                    str(folder),
                    must=f"hold a data set made with {key} = {value}",
                    got=f"one made with {key} = {spec.options.get(key, before.get(key))}",
                    fix="remove the folder or choose another one",
                )
            )
