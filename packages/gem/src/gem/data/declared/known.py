"""What the ids of a data set stand for, so that one of a longer log gives them the same meaning."""

from pathlib import Path

from gem.data.dataset import Dataset
from gem.data.declared.files import WHERE
from gem.data.declared.spec import Declaration
from gem_opkit.errors import ConfigError, DataError, refusal


def known_values(folder: Path, declaration: Declaration) -> dict[str, tuple[str, ...]]:
    """Read which texts have which rows in a data set.

    Args:
        folder: a data set that was made by a declaration.
        declaration: of the data set that shall keep these rows.

    Returns:
        table -> the texts of its rows 1, 2, ...; tables with hashed ids are left out.

    Raises:
        ConfigError: the data set is another log's, or lacks a table.
        DataError: there is none, or what its ids stand for is missing or damaged.
    """
    before = Dataset.open(folder)
    if before.spec.name != declaration.name:
        raise ConfigError(
            refusal(
                WHERE,
                "--grown-from",
                must=f"be a data set {declaration.name!r}",
                got=f"{before.spec.name!r} in {folder}",
                fix="name the one that was made of this log before",
            )
        )
    found = {}
    for name in declaration.tables():
        if name in declaration.hash_rows:
            continue
        values = before.vocabulary(name)
        if values is None:
            raise DataError(
                refusal(
                    WHERE,
                    "--grown-from",
                    must=f"say in vocabularies/{name} what its ids stand for",
                    got=f"nothing in {folder}",
                    fix="make that data set again",
                )
            )
        found[name] = values
    return found
