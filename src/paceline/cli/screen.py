"""What every command writes goes through here: printable text alone, and one way to end.

A name in a checkpoint, a host or an error of another machine may hold anything; on a terminal it
must not do anything. And where the output cannot be written, that is no answer of the command's.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

import typer

from paceline.cli.console import give_up, open_standard_streams, say
from paceline.errors import PacelineError, RankFailed
from paceline.launch import exit_codes
from paceline.untrusted import printable

TROUBLE = 2
"""The exit status where the system refused something: never one that is an answer."""


class ReaderGone(Exception):
    """Whoever read the output has left."""


@contextlib.contextmanager
def pipe_apart() -> Iterator[None]:
    """A closed pipe as ``ReaderGone``, which typer leaves alone."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        raise ReaderGone from error


def echo(text: object = "", *, err: bool = False, nl: bool = True, bold: bool = False) -> None:
    """Print ``text``, with what is not printable in it shown as escapes."""
    shown = printable(text)
    typer.echo(typer.style(shown, bold=True) if bold else shown, err=err, nl=nl)


def echo_json(text: str) -> None:
    """Print a text that is JSON, and leave it JSON."""
    # All but this one are escaped by json.dumps, and it can only stand inside of a string.
    typer.echo(text.replace("\x7f", "\\u007f"))


def run(command: Callable[[], object]) -> NoReturn:
    """Run the command line and leave with its status; no error of a known kind is a traceback.

    What Paceline raises on purpose ends as its text. Output that cannot be written (a full disk,
    a folder that is not there, no rights) ends with the cause and status 2; output that nobody
    reads any more quietly with 141, as for any program that writes into a closed pipe.
    """
    _prepare_streams()
    try:
        command()
        sys.stdout.flush()
    except PacelineError as error:
        _leave(exit_status(error), str(error))
    except OSError as error:
        _leave_refused(error)
    except ReaderGone:
        _leave(128 + signal.SIGPIPE)
    except SystemExit as ending:
        try:
            sys.stdout.flush()
        except OSError as error:
            _leave_refused(error)
        except ValueError:  # it was closed: nothing is left to write
            give_up(sys.stdout)
        raise ending from None
    _leave(0)


def _prepare_streams() -> None:
    """There are three, and the two for output take any text."""
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # A file name need not be text, and a terminal may know less than all characters.
        if isinstance(stream, io.TextIOWrapper) and not stream.closed:
            stream.reconfigure(errors="backslashreplace")


def exit_status(error: PacelineError) -> int:
    """2 for a mistake of the user's, the rank's own status for a failed rank, else 1.

    A scheduler that starts launchers again is told where that would be in vain.
    """
    if isinstance(error, RankFailed):
        if error.would_recur and os.environ.get(exit_codes.SCHEDULED):
            return exit_codes.WOULD_RECUR
        # A shell reports a process killed by signal n as 128 + n.
        return 128 - error.exit_code if error.exit_code < 0 else error.exit_code or 1
    return 2 if isinstance(error, ValueError | ImportError) else 1


def what_was_refused(error: OSError) -> str:
    """Which file, and why; standard output has no name."""
    why = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return f"cannot write or read: {why}"
    return f"{os.fsdecode(error.filename)}: {why}"


def _leave_refused(error: OSError) -> NoReturn:
    if error.errno == errno.EPIPE:
        _leave(128 + signal.SIGPIPE)
    _leave(TROUBLE, what_was_refused(error))


def _leave(status: int, words: str = "") -> NoReturn:
    """Print why, if anybody can read it, and leave; Python's own flush at exit finds no trouble."""
    if words:
        say(words, error=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            give_up(stream)
    sys.exit(status)
