"""Shapes on which lookups and updates of tables are tested and timed; imports no torch."""

from dataclasses import dataclass

from gem_embeddings.contract import Pooling, RowDtype


@dataclass(frozen=True, slots=True)
class TableCase:
    """Equal tables, each looked up by one feature of equally many ids an example.

    Attributes:
        name: what it stands for.
        tables: how many.
        rows: of each.
        examples: of the batch.
        ids: of an example and feature.
        pooling: of all features.
        row_dtype: format of the rows.
        zipf: whether ids are skewed, with exponent 1.05.
        width: elements of a row.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, ``"cuda"`` for one
            that only a GPU should.
    """

    name: str
    tables: int
    rows: int
    examples: int
    ids: int
    pooling: Pooling = "sum"
    row_dtype: RowDtype = "fp32"
    zipf: bool = True
    width: int = 128
    device: str = "cuda"


# Click logs of one id a feature, bags of what a user has liked, and long event sequences.
CASES: tuple[TableCase, ...] = (
    TableCase("bags_of_1", 26, 2_000_000, 65_536, 1),
    TableCase("bags_of_20", 8, 4_000_000, 8_192, 20),
    TableCase("bags_of_20_fp16", 8, 4_000_000, 8_192, 20, row_dtype="fp16"),
    TableCase("bags_of_20_bf16", 8, 4_000_000, 8_192, 20, row_dtype="bf16"),
    TableCase("sequences_1000", 2, 20_000_000, 1_024, 1_000, pooling="none"),
    TableCase("bags_of_20_uniform", 8, 4_000_000, 8_192, 20, zipf=False),
    TableCase("bags_of_20_small", 2, 20_000, 256, 20, width=32, device="cpu"),
)
