"""What a batch holds, as the model sees it: names, tables and sizes of every input.

The reader derives a `BatchSchema` from the data set's spec and the recipe; the model is built from
it and knows nothing of files, joins or statistics. Torch-free, so that a plan can be made from it.
"""

from pydantic import Field

from gem_opkit.contract import Contract


class IdInput(Contract):
    """A categorical input: the ids that it carries and the table that they index."""

    name: str = Field(description="name of the input, unique among the inputs of its owner")
    table: str = Field(description="table that the ids look up; inputs may share one")
    num_embeddings: int = Field(gt=0, description="rows of that table")
    id_space: str = Field(
        default="row",
        pattern="^(row|hash)$",
        description="row: ids are row indices; hash: any int64, hashed to a row",
    )
    multi: bool = Field(default=False, description="several ids an example (pooled), else one")


class StreamInput(Contract):
    """One jagged event sequence: the id fields and the continuous fields of each event."""

    name: str
    ids: tuple[IdInput, ...] = Field(description="id fields of an event, in batch order")
    numbers: tuple[str, ...] = Field(
        default=(), description="names of the columns of `StreamBatch.numbers`, in order"
    )
    max_events: int = Field(gt=0, description="longest history that the reader gives")


class VectorInput(Contract):
    """A cached embedding of the example's user, made by another model."""

    name: str
    width: int = Field(gt=0, description="numbers of the embedding; a flag follows them")


class BatchSchema(Contract):
    """Every input and target of an `ExampleBatch`."""

    streams: tuple[StreamInput, ...] = ()
    ids: tuple[IdInput, ...] = Field(default=(), description="non-sequence categorical inputs")
    numbers: tuple[str, ...] = Field(
        default=(), description="names of the columns of `numbers_BD`, in order"
    )
    item: str | None = Field(
        default=None,
        description="name of the id input that is the candidate, and of the stream field that "
        "holds the same kind of id, for target-aware attention",
    )
    of_user: tuple[str, ...] = Field(
        default=(),
        description="inputs of `ids` and `numbers` that belong to the user: its id and the fields "
        "of its entity",
    )
    of_item: tuple[str, ...] = Field(
        default=(), description="inputs of `ids` that belong to the candidate, likewise"
    )
    vectors: tuple[VectorInput, ...] = Field(
        default=(), description="parts of `vectors_BV`, in order"
    )
    teacher: bool = Field(default=False, description="batches carry a teacher's logits")
    labels: tuple[str, ...] = Field(description="tasks, in the order of `labels_BA`")
    domains: tuple[str, ...] = Field(
        default=("all",), description="domain names; `domains_B` indexes them"
    )
