"""What other packages may ask of packed batches: limits on lengths, and how batches are packed."""

from typing import Literal, Self

from pydantic import Field, model_validator

from gem_opkit.contract import Contract


class LengthLimits(Contract):
    """Bounds on the lengths of a batch's sequences, known before any batch exists."""

    max_length_tokens: int = Field(gt=0, description="tokens of the longest sequence allowed")
    min_length_tokens: int = Field(
        default=0, ge=0, description="tokens of the shortest sequence allowed"
    )
    max_sequences: int | None = Field(
        default=None, gt=0, description="sequences a batch may have; None for no limit"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_length_tokens > self.max_length_tokens:
            raise ValueError(
                f"min_length_tokens must be at most max_length_tokens "
                f"({self.max_length_tokens}); got {self.min_length_tokens}"
            )
        return self

    @property
    def max_total_tokens(self) -> int | None:
        """Most tokens of a batch; None without a limit on sequences."""
        return None if self.max_sequences is None else self.max_sequences * self.max_length_tokens


class PackingSpec(Contract):
    """How sequences become a packed batch."""

    limits: LengthLimits
    offsets_bits: Literal[32, 64] = Field(default=64, description="width of an offset in bits")
    keep: Literal["first", "last"] = Field(
        default="last", description="tokens that stay of a sequence longer than the limit"
    )

    @model_validator(mode="after")
    def _offsets_fit(self) -> Self:
        total = self.limits.max_total_tokens
        if self.offsets_bits == 32 and (total is None or total >= 2**31):
            raise ValueError(
                f"offsets_bits=32 needs limits.max_sequences × limits.max_length_tokens below "
                f"2^31; got {'no limit' if total is None else total}; use 64"
            )
        return self
