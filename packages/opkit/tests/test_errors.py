"""Errors can be caught both by our base and by the built-in that a caller expects."""

import pytest

from gem_opkit import errors
from gem_opkit.errors import GemError, refusal


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ShapeError, ValueError),
        (errors.DtypeError, TypeError),
        (errors.DeviceError, ValueError),
        (errors.UnsupportedError, NotImplementedError),
        (errors.ConfigError, ValueError),
        (errors.DataError, ValueError),
        (errors.MeasurementError, RuntimeError),
    ],
)
def test_error_is_caught_by_both_bases(error, builtin):
    for base in (GemError, builtin):
        with pytest.raises(base, match=r"^op: "):
            raise error("op: x must y; got z; do w")


def test_refusal_has_the_common_form():
    message = refusal("op", "k_SGK", must="have K=64", got=128, fix="use one head width")
    assert message == "op: k_SGK must have K=64; got 128; use one head width"
