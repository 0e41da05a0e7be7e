"""Packed batches: the tokens of B sequences in one tensor, and where each sequence begins.

``Layout`` says where sequences begin and is shared by everything that has the same tokens;
``Jagged`` is a tensor of tokens with its layout. Both keep the lengths in host memory too, so that
no operator reads a device tensor to learn a size.

Left out: padding, concatenation and the like (``gem_jagged.ops``), and index arithmetic
(``gem_jagged.offsets``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gem_jagged.checks import (
    check_host_lengths,
    check_offset_dtype,
    check_offset_values,
    check_offsets_shape,
    check_total_fits,
    host_lengths,
    sum_of_lengths,
)
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, refusal

Level = Literal["shapes", "values"]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where each sequence of a packed batch begins and ends.

    Build it with ``from_lengths``, ``from_offsets`` or ``constant``. The constructor takes its
    fields as they are and checks nothing; inside ``torch.compile`` give it all four, because the
    total cannot be computed there without a graph break.

    Attributes:
        offsets_O: first token of each sequence and, last, the number of tokens; int32 or int64,
            non-decreasing, starts at 0; on the device of the tokens.
        lengths: tokens of each sequence, int64, on the CPU.
        max_length: the longest length; 0 for an empty batch.
        total_tokens: sum of the lengths; computed from ``lengths`` where it is left out.
    """

    offsets_O: Tensor
    lengths: Tensor
    max_length: int
    total_tokens: int = -1

    def __post_init__(self) -> None:
        """Fill in the total, from host memory."""
        if self.total_tokens < 0:
            # A frozen dataclass has no other way to fill a field after construction.
            object.__setattr__(self, "total_tokens", int(self.lengths.sum()))

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.lengths.shape[0]

    @classmethod
    def from_lengths(
        cls,
        lengths: object,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.int64,
    ) -> "Layout":
        """Make a layout from host lengths.

        Args:
            lengths: tokens of each sequence, at least 0: a list, a numpy array or a CPU tensor of
                integers, one dim.
            device: where the offsets go. The copy to a GPU does not wait for it.
            dtype: of the offsets, ``torch.int32`` or ``torch.int64``.

        Returns:
            the layout.

        Raises:
            ShapeError: not one dim, a negative length, or a total that int32 cannot hold.
            DtypeError: lengths or offsets that are not integers of an accepted kind.
            DeviceError: lengths on a GPU, which would have to be read back.
        """
        host = host_lengths("Layout.from_lengths", lengths)
        check_offset_dtype("Layout.from_lengths", dtype)
        total = sum_of_lengths("Layout.from_lengths", host)
        offsets = torch.zeros(host.shape[0] + 1, dtype=torch.int64)
        torch.cumsum(host, 0, out=offsets[1:])
        check_total_fits("Layout.from_lengths", total, dtype)
        return cls(
            offsets_O=offsets.to(dtype).to(device, non_blocking=True),
            lengths=host,
            max_length=int(host.max()) if host.shape[0] else 0,
            total_tokens=total,
        )

    @classmethod
    def from_offsets(cls, offsets_O: Tensor) -> "Layout":
        """Make a layout from offsets. Reads them once on the host: on a GPU this waits for it.

        Args:
            offsets_O: int32 or int64, starts at 0, non-decreasing, at least one element.

        Returns:
            the layout; ``offsets_O`` itself is kept, not copied.

        Raises:
            ShapeError, DtypeError: the offsets break a rule; the message names the first bad row.
        """
        op = "Layout.from_offsets"
        check_offsets_shape(op, offsets_O)
        host = offsets_O.detach().to("cpu", torch.int64)
        lengths = host.diff()
        check_offset_values(op, host, lengths)
        return cls(
            offsets_O=offsets_O,
            lengths=lengths,
            max_length=int(lengths.max()) if lengths.shape[0] else 0,
            total_tokens=int(host[-1]),
        )

    @classmethod
    def constant(
        cls,
        batch: int,
        length: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.int64,
    ) -> "Layout":
        """Make the layout of ``batch`` sequences that all have ``length`` tokens.

        Args:
            batch: number of sequences, at least 0.
            length: tokens of each, at least 0.
            device: where the offsets go; they are computed there, nothing is copied.
            dtype: of the offsets, ``torch.int32`` or ``torch.int64``.

        Returns:
            the layout.

        Raises:
            ShapeError: a negative number, or a total that int32 cannot hold.
            DtypeError: another dtype.
        """
        op = "Layout.constant"
        for name, value in (("batch", batch), ("length", length)):
            if value < 0:
                raise ShapeError(
                    refusal(op, name, must="be at least 0", got=value, fix="pass a count")
                )
        check_offset_dtype(op, dtype)
        check_total_fits(op, batch * length, dtype)
        steps = torch.arange(batch + 1, dtype=dtype, device=device)
        return cls(
            offsets_O=steps * length,
            lengths=torch.full((batch,), length, dtype=torch.int64),
            max_length=length if batch else 0,
            total_tokens=batch * length,
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Layout":
        """Return the same layout with its offsets on ``device``; lengths stay on the host.

        Args:
            device: the target.
            non_blocking: as in ``torch.Tensor.to``.

        Returns:
            a layout; ``self`` where nothing moves.
        """
        moved = self.offsets_O.to(device, non_blocking=non_blocking)
        if moved is self.offsets_O:
            return self
        return Layout(moved, self.lengths, self.max_length, self.total_tokens)

    def checked(self, level: Level, total_tokens: int | None = None) -> "Layout":
        """Check the layout and return it; call it in eager code at the edge of a program.

        Args:
            level: ``"shapes"`` looks at shapes, dtypes and host lengths and never waits for a
                device; ``"values"`` also reads the offsets, which on a GPU waits for it.
            total_tokens: number of tokens that the values really have, where known.

        Returns:
            the layout itself.

        Raises:
            ShapeError, DtypeError, DeviceError: something is inconsistent; the message names the
                first bad row.
            ConfigError: an unknown level.
        """
        self._check("Layout.checked", level, total_tokens)
        return self

    def _check(self, op: str, level: str, total_tokens: int | None) -> None:
        if level not in ("shapes", "values"):
            raise ConfigError(
                refusal(
                    op,
                    "level",
                    must='be "shapes" or "values"',
                    got=repr(level),
                    fix='use "shapes" in a training loop and "values" to look for a fault',
                )
            )
        check_offsets_shape(op, self.offsets_O)
        check_host_lengths(op, self.lengths)
        batch = self.offsets_O.shape[0] - 1
        if self.lengths.shape[0] != batch:
            raise ShapeError(
                f"{op}: lengths has B={self.lengths.shape[0]} but offsets_O has B={batch}; "
                f"build both with Layout.from_lengths"
            )
        longest = int(self.lengths.max()) if batch else 0
        if self.max_length != longest:
            raise ShapeError(
                refusal(
                    op,
                    "max_length",
                    must=f"be the longest length, {longest}",
                    got=self.max_length,
                    fix="build the layout with Layout.from_lengths",
                )
            )
        total = sum_of_lengths(op, self.lengths)
        if self.total_tokens != total:
            raise ShapeError(
                refusal(
                    op,
                    "total_tokens",
                    must=f"be the sum of the lengths, {total}",
                    got=self.total_tokens,
                    fix="build the layout with Layout.from_lengths",
                )
            )
        check_total_fits(op, total, self.offsets_O.dtype)
        if total_tokens is not None and total_tokens != total:
            raise ShapeError(
                f"{op}: values has {total_tokens} tokens but the lengths sum to {total}; "
                f"pass the tokens of exactly these sequences"
            )
        if level == "values":
            host = self.offsets_O.detach().to("cpu", torch.int64)
            check_offset_values(op, host, host.diff(), expected=self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """The tokens of B sequences of unequal length, one after the other.

    Attributes:
        values: tokens, (T,), (T, D) or (T, H, K), of any dtype.
        offsets_O: first token of each sequence, as in ``Layout``.
        lengths: tokens of each sequence, int64, on the CPU.
        max_length: the longest length; 0 for an empty batch.
    """

    values: Tensor
    offsets_O: Tensor
    lengths: Tensor
    max_length: int

    @property
    def layout(self) -> Layout:
        """Where the sequences begin. Its total is the number of tokens in ``values``."""
        return Layout(self.offsets_O, self.lengths, self.max_length, self.values.shape[0])

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.lengths.shape[0]

    @property
    def total_tokens(self) -> int:
        """Number of tokens of all sequences together."""
        return self.values.shape[0]

    @classmethod
    def from_list(cls, sequences: Sequence[Tensor]) -> "Jagged":
        """Pack a list of sequences.

        Args:
            sequences: at least one tensor; equal in dtype, device and all dims but the first.

        Returns:
            the packed batch, offsets in int64.

        Raises:
            ShapeError: an empty list, or tensors that differ in more than their length.
            DtypeError, DeviceError: tensors of different dtypes, or on different devices.
        """
        op = "Jagged.from_list"
        if not sequences:
            raise ShapeError(
                refusal(
                    op,
                    "sequences",
                    must="have at least one tensor, which tells dtype and width",
                    got="an empty list",
                    fix="use Jagged.from_lengths(values, []) for a batch of none",
                )
            )
        first = sequences[0]
        for row, tensor in enumerate(sequences):
            if tensor.ndim == 0 or tensor.shape[1:] != first.shape[1:]:
                raise ShapeError(
                    refusal(
                        op,
                        f"sequences[{row}]",
                        must=f"have shape (length, {', '.join(map(str, first.shape[1:]))})",
                        got=tuple(tensor.shape),
                        fix="make all sequences equally wide",
                    )
                )
            if tensor.device != first.device:
                raise DeviceError(
                    refusal(
                        op,
                        f"sequences[{row}]",
                        must=f"be on {first.device} like sequences[0]",
                        got=tensor.device,
                        fix="move it",
                    )
                )
            if tensor.dtype != first.dtype:
                raise DtypeError(
                    refusal(
                        op,
                        f"sequences[{row}]",
                        must=f"be {first.dtype} like sequences[0]",
                        got=tensor.dtype,
                        fix="convert it",
                    )
                )
        lengths = [tensor.shape[0] for tensor in sequences]
        return cls.from_lengths(torch.cat(list(sequences)), lengths)

    @classmethod
    def from_lengths(
        cls, values: Tensor, lengths: object, *, dtype: torch.dtype = torch.int64
    ) -> "Jagged":
        """Give packed values their lengths.

        Args:
            values: tokens of all sequences, one after the other.
            lengths: tokens of each sequence, in host memory, as in ``Layout.from_lengths``.
            dtype: of the offsets, ``torch.int32`` or ``torch.int64``.

        Returns:
            the packed batch; ``values`` is kept, not copied.

        Raises:
            ShapeError, DtypeError, DeviceError: as ``Layout.from_lengths``, or a total that is
                not the number of tokens in ``values``.
        """
        layout = Layout.from_lengths(lengths, device=values.device, dtype=dtype)
        return _join("Jagged.from_lengths", values, layout)

    @classmethod
    def from_layout(cls, values: Tensor, layout: Layout) -> "Jagged":
        """Give packed values an existing layout.

        Args:
            values: tokens of all sequences, one after the other.
            layout: where they begin; shared, not copied.

        Returns:
            the packed batch.

        Raises:
            ShapeError: the layout's total is not the number of tokens in ``values``.
        """
        return _join("Jagged.from_layout", values, layout)

    def with_values(self, values: Tensor) -> "Jagged":
        """Return other tokens in the same layout.

        Args:
            values: as many tokens as ``self`` has; width and dtype may differ.

        Returns:
            the packed batch, sharing offsets and lengths.

        Raises:
            ShapeError: another number of tokens.
        """
        return _join("Jagged.with_values", values, self.layout)

    def checked(self, level: Level) -> "Jagged":
        """Check the batch and return it; call it in eager code at the edge of a program.

        Args:
            level: ``"shapes"`` never waits for a device; ``"values"`` also reads the offsets.

        Returns:
            the batch itself.

        Raises:
            ShapeError, DtypeError, DeviceError: something is inconsistent; the message names the
                first bad row.
            ConfigError: an unknown level.
        """
        op = "Jagged.checked"
        if self.values.ndim == 0:
            raise ShapeError(
                refusal(op, "values", must="have a token dim", got="a scalar", fix="reshape it")
            )
        if self.values.device != self.offsets_O.device:
            raise DeviceError(
                refusal(
                    op,
                    "offsets_O",
                    must=f"be on {self.values.device} like the values",
                    got=self.offsets_O.device,
                    fix="move the whole batch with Jagged.to",
                )
            )
        # Built here rather than through ``layout``, whose total is the number of tokens by
        # definition: that number is what is being checked.
        layout = Layout(self.offsets_O, self.lengths, self.max_length)
        layout._check(op, level, self.values.shape[0])
        return self

    def to_list(self) -> list[Tensor]:
        """Return the sequences as a list of views of ``values``."""
        return list(self.values.split(self.lengths.tolist()))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Jagged":
        """Return the same batch with values and offsets on ``device``; lengths stay on the host.

        Args:
            device: the target.
            non_blocking: as in ``torch.Tensor.to``.

        Returns:
            a batch.
        """
        return Jagged(
            self.values.to(device, non_blocking=non_blocking),
            self.offsets_O.to(device, non_blocking=non_blocking),
            self.lengths,
            self.max_length,
        )


def _join(op: str, values: Tensor, layout: Layout) -> Jagged:
    if values.ndim == 0:
        raise ShapeError(
            refusal(op, "values", must="have a token dim", got="a scalar", fix="reshape it")
        )
    if values.shape[0] != layout.total_tokens:
        raise ShapeError(
            f"{op}: values has {values.shape[0]} tokens but the lengths sum to "
            f"{layout.total_tokens}; pass the tokens of exactly these sequences"
        )
    return Jagged(values, layout.offsets_O, layout.lengths, layout.max_length)
