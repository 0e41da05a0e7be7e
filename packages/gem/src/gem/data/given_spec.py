"""What other models give to the rows of a data set: sections of a recipe's `[data]`. No torch."""

from pydantic import Field

from gem_opkit.contract import Contract

Fingerprint = Field(
    default=None,
    pattern=r"^[0-9a-f]{64}$",
    description="of the model that must have written it; none: whoever wrote it. A run keeps the "
    "one that it was trained with, and refuses others from then on",
)


class UserEmbeddingRead(Contract):
    """A cached user embedding: the newest one strictly older than the example."""

    folder: str = Field(description="folder that `gem predict RUN --embeddings` wrote")
    fingerprint: str | None = Fingerprint
    max_age_hours: float | None = Field(
        default=None, gt=0, description="an older one counts as none; none given: any age will do"
    )
    age: bool = Field(
        default=True,
        description="give the model its age, the number `<name>_age_hours`; 0 where there is none",
    )


class TeacherRead(Contract):
    """A teacher's predictions of the training rows, by user, item and time."""

    folder: str = Field(description="folder that `gem predict RUN` wrote")
    fingerprint: str | None = Fingerprint
