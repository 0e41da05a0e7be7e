"""The process of the command `gem`, and of `python -m gem`.

What takes time is imported under `interrupts_end_at_once`, so that a Ctrl-C in the first moments
shows no traceback.
"""

import sys

try:
    import signal
    from typing import Any, cast

    from gem.quick_exit import end_at_once, interrupts_end_at_once
except KeyboardInterrupt:  # before there is a handler
    sys.stderr.write("interrupted\n")
    raise SystemExit(130) from None


def main() -> None:
    """Run the command line of this process. Ends it."""
    with interrupts_end_at_once():
        from gem import cli

    # A path may hold bytes that are no text.
    cast(Any, sys.stdout).reconfigure(errors="backslashreplace")
    try:
        cli.main()
    finally:
        # Everything is written and said; what is left is Python's own clearing up.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, end_at_once)


if __name__ == "__main__":
    main()
