"""The errors that GEM's packages raise on purpose.

Each derives from the built-in error that a caller would expect, and from ``GemError``, so that
both ``except ValueError`` and ``except GemError`` work. Messages follow one pattern, which
``refusal`` writes: ``<op>: <name> must <rule>; got <value>; <what to do>``.

Left out: pydantic's ``ValidationError``. Contracts raise it, and it already names the field.
"""


class GemError(Exception):
    """Base of every error that GEM raises on purpose."""


class ShapeError(GemError, ValueError):
    """A tensor's dims break the suffix of its name or the rule of an operator."""


class DtypeError(GemError, TypeError):
    """An argument has a dtype, or a type, that the operator does not take."""


class DeviceError(GemError, ValueError):
    """Tensors lie on the wrong device, or on different devices."""


class UnsupportedError(GemError, NotImplementedError):
    """What was asked for is not built, or not on this hardware; the message names what is."""


class ConfigError(GemError, ValueError):
    """A setting given by the user is wrong, unknown or contradicts another one."""


class DataError(GemError, ValueError):
    """User data is missing, malformed or out of the range that its schema declares."""


class MeasurementError(GemError, RuntimeError):
    """A measured figure cannot be true, for example more than the peak of the device."""


def refusal(op: str, name: str, *, must: str, got: object, fix: str) -> str:
    """Write the message of an error in the form that all packages share.

    Args:
        op: operator, command or class that refuses.
        name: the argument's own name.
        must: the rule, continuing the words "<name> must".
        got: the value that arrived; shown with ``str``.
        fix: what the caller can do.

    Returns:
        ``<op>: <name> must <rule>; got <value>; <what to do>``.
    """
    return f"{op}: {name} must {must}; got {got}; {fix}"
