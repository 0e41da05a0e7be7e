"""Fixed maps of continuous inputs. Nothing here is fitted, so nothing can look ahead."""

from collections.abc import Mapping, Sequence

import numpy as np

from gem.data.features import DatasetSpec, DataSpec, NumberTransform


def resolved_transforms(dataset: DatasetSpec, data: DataSpec) -> dict[str, NumberTransform]:
    """The transform of every continuous field that has one.

    Args:
        dataset: declares typical values and spreads.
        data: the recipe's own transforms, which come first.

    Returns:
        by name of the field.
    """
    owners = (dataset.examples, *dataset.entities, *dataset.streams)
    declared = {
        field.name: NumberTransform(offset=field.offset, scale=field.scale)
        for owner in owners
        for field in owner.numbers
        if (field.offset, field.scale) != (0.0, 1.0)
    }
    return declared | dict(data.transforms)


def apply_transforms(
    block: np.ndarray, names: Sequence[str], transforms: Mapping[str, NumberTransform]
) -> None:
    """Map the columns of a block in place: y = clip((f(x) - offset) / scale, -limit, limit).

    Args:
        block: float32 (rows, columns), finite.
        names: of the columns.
        transforms: by name; a column without one is left as it is.
    """
    for place, name in enumerate(names):
        transform = transforms.get(name)
        if transform is None:
            continue
        values = block[:, place].astype(np.float64)
        if transform.function == "log1p":
            values = np.sign(values) * np.log1p(np.abs(values))
        values = (values - transform.offset) / transform.scale
        block[:, place] = np.clip(values, -transform.limit, transform.limit)
