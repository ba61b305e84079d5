"""Ends a program by Ctrl-C while it imports its modules, which takes seconds."""

import os
import signal


def end_at_interrupt() -> None:
    """Lets Ctrl-C end the process at once, with one sentence, until another handler is set.

    Python's own handler raises an exception, which prints a traceback, or is lost in a module that catches it or in a
    callback of C code.
    """
    signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: object) -> None:
    os.write(2, b"error: stopped by SIGINT\n")
    os._exit(128 + number)
