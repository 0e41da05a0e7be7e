"""When a rank counts as slower than the rest: the recipe's ``[train.straggler]``. No torch."""

from pydantic import Field

from gem_opkit.contract import Contract


class StragglerSpec(Contract):
    """Which ranks the log names because the others wait for them."""

    ratio: float = Field(
        default=1.25,
        gt=1,
        description="time of its own over that of the other ranks from which on a rank is slower",
    )
    rows: int = Field(
        default=3,
        ge=0,
        description="rows of the log in a row after which it is named; 0: nobody looks",
    )
