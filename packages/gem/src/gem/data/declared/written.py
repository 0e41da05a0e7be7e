"""The contract of a data set that was made as a declaration says."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gem.data.declared.encode import MISSING_HASH, MISSING_ID, Hashes, Vocabulary
from gem.data.declared.spec import (
    ITEM,
    TIME,
    USER,
    CategoryColumn,
    Declaration,
    NumberColumn,
    StreamTable,
    milliseconds,
)
from gem.data.features import DatasetSpec

PAST_UNKNOWN, PAST_NO, PAST_YES = range(3)  # ids of a past label in a stream of the examples
_MOST_NAMED = 1000  # values that dataset.toml lists; those of larger tables are in a file alone

_Tables = Mapping[str, Vocabulary | Hashes]


def dataset_spec(
    declaration: Declaration,
    tables: _Tables,
    times: np.ndarray,
    digest: str,
    left_out_rows: int,
) -> DatasetSpec:
    """What was written.

    Args:
        declaration: by which.
        tables: its id tables, closed.
        times: of all examples, ms, in order.
        digest: of the declaration.
        left_out_rows: rows of the examples' files that are no examples.

    Returns:
        the contract of the data set.
    """
    examples = declaration.examples
    ids = [_id_field(CategoryColumn(column=USER, table="user"), tables)] if examples.user else []
    if examples.item is not None:
        ids.append(_id_field(CategoryColumn(column=ITEM, table="item"), tables))
    ids += [_id_field(column, tables) for column in examples.categories]
    labels = [
        {
            "name": label.name,
            "description": label.description,
            "visible_after_ms": round(label.delay_s * 1000),
        }
        for label in examples.labels
    ]
    past = dict.fromkeys(name for stream in declaration.streams for name in stream.labels)
    return DatasetSpec.model_validate(
        {
            "name": declaration.name,
            "description": declaration.description,
            "terms": declaration.terms,
            "citation": declaration.citation,
            "tables": [
                *(_table(name, table) for name, table in tables.items()),
                *(
                    {
                        "name": f"past_{name}",
                        "num_embeddings": 3,
                        "values": ["unknown", "no", "yes"],
                    }
                    for name in past
                ),
            ],
            "entities": [
                {
                    "name": name,
                    "key": entity.of or {"user": USER, "item": ITEM}.get(name, name),
                    "ids": [_id_field(column, tables) for column in entity.categories],
                    "numbers": [_number_field(column) for column in entity.numbers],
                }
                for name, entity in declaration.entities.items()
            ],
            "streams": [_stream(declaration, stream, tables) for stream in declaration.streams],
            "examples": {
                "rows": len(times),
                "item": ITEM if examples.item is not None else None,
                "ids": ids,
                "numbers": [_number_field(column) for column in examples.numbers],
                "labels": labels,
                "weight": examples.weight,
            },
            "splits": _splits(declaration, times),
            "options": {"declaration": digest, "left_out_rows": left_out_rows},
        }
    )


def _table(name: str, table: Vocabulary | Hashes) -> dict[str, Any]:
    if isinstance(table, Hashes):
        return {"name": name, "num_embeddings": table.rows, "id_space": "hash"}
    found: dict[str, Any] = {"name": name, "num_embeddings": table.rows}
    if table.rows <= _MOST_NAMED:
        found["values"] = ["unknown value", *table.values]
    return found


def _id_field(column: CategoryColumn, tables: _Tables) -> dict[str, Any]:
    name = column.table or column.named
    hashed = isinstance(tables[name], Hashes)
    field: dict[str, Any] = {"name": column.named, "table": name}
    field["fill"] = MISSING_HASH if hashed else MISSING_ID
    if column.separator is not None:
        field["multi"] = True
    return field


def _event_id_field(column: CategoryColumn, tables: _Tables) -> dict[str, Any]:
    field = _id_field(column, tables)
    return field | {"unknown": field["fill"]}


def _number_field(column: NumberColumn) -> dict[str, Any]:
    keys = ("fill", "unit", "offset", "scale")
    return {"name": column.named} | {key: getattr(column, key) for key in keys}


def _stream(declaration: Declaration, stream: StreamTable, tables: _Tables) -> dict[str, Any]:
    of_examples = stream.file is None
    item = declaration.examples.item if of_examples else stream.item
    fields = [CategoryColumn(column=ITEM, table="item")] if item is not None else []
    declared = {column.named: column for column in declaration.examples.categories}
    for column in stream.categories:
        fields.append(declared[column.column] if of_examples else column)
    ids = [_event_id_field(column, tables) for column in fields]
    delays = {label.name: label.delay_s for label in declaration.examples.labels}
    for label in stream.labels:
        ids.append(
            {
                "name": f"past_{label}",
                "table": f"past_{label}",
                "fill": PAST_UNKNOWN,
                "unknown": PAST_UNKNOWN,
                "visible_after_ms": round(delays[label] * 1000),
            }
        )
    numbers = [_number_field(column) for column in stream.numbers]
    return {"name": stream.name, "user": USER, "time": TIME, "ids": ids, "numbers": numbers}


def _splits(declaration: Declaration, times: np.ndarray) -> list[dict[str, Any]]:
    splits, rows = declaration.splits, len(times)
    if splits.valid_from is not None and splits.test_from is not None:
        moments = [milliseconds(splits.valid_from), milliseconds(splits.test_from)]
        valid, test = (int(np.searchsorted(times, moment)) for moment in moments)
    else:
        held_out = round(rows * splits.test_frac)
        test = rows - held_out
        valid = test - round(rows * splits.valid_frac)
    return [
        {"name": "train", "start": 0, "stop": valid},
        {"name": "valid", "start": valid, "stop": test},
        {"name": "test", "start": test, "stop": rows},
    ]
