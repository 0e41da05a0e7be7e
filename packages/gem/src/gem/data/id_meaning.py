"""Whether the ids of a table mean the same in two data sets."""

from gem.data.dataset import Dataset


def difference(table: str, first: Dataset, second: Dataset) -> str | None:
    """Say how the meaning of a table's ids differs.

    Args:
        table: that both declare.
        first: a data set.
        second: another one.

    Returns:
        a few words; None where the ids mean the same: hashed in both, named alike, or of two data
        sets that were made alike, as a slice and what it was cut from.

    Raises:
        DataError: what the ids of one stand for is damaged.
    """
    own, other = first.spec.table(table), second.spec.table(table)
    if own.id_space != other.id_space:
        return f"{own.id_space} ids in {first.folder} and {other.id_space} ids in {second.folder}"
    if own.id_space == "hash":
        return None
    vocabularies = [each.vocabulary(table) for each in (first, second)]
    named = vocabularies
    if None in named:
        named = [each.values or None for each in (own, other)]
    if named[0] is not None and named[1] is not None:
        pairs = enumerate(zip(*named, strict=False))
        for place, (one, two) in pairs:
            if one != two:
                return f"{one!r} in {first.folder} and {two!r} in {second.folder} at place {place}"
        return None
    alike = (first.spec.name, first.spec.options) == (second.spec.name, second.spec.options)
    # One declaration makes other ids of another log; what it makes says what they stand for.
    if alike and vocabularies == [None, None] and "declaration" not in first.spec.options:
        return None
    return f"nothing that tells what they mean in {first.folder} and {second.folder}"
