"""A mistake that the user can mend, in one sentence."""

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(ValueError):
    """What the user can fix. Each sentence says what was found, what was expected, what to do."""

    def __str__(self) -> str:
        return "; ".join(self.args)


class UsageError(UserError):
    """Flags that cannot be right, a sentence each. The script exits with 2."""


def first_line(error: Exception) -> str:
    """The first line of an error's message. Some libraries add a page to it."""
    return str(error).partition("\n")[0].strip()


# where messages of PyTorch and NumPy go on to advise loading the file unsafely, which runs its code
UNSAFE = re.compile(r"This file can still|In PyTorch 2\.6|If you trust")


@contextmanager
def reading(
    name: str | Path, advice: str = "fix that, then start again", failed: str = "cannot be read"
) -> Iterator[None]:
    """Turns any error of a library into one sentence: `name`, how it failed, and why."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = UNSAFE.split(str(error))[0]
        reason = f"{type(error).__name__}: {textwrap.shorten(said, 400)}"
        raise UserError(f"{name} {failed} ({reason}); {advice}") from error


@contextmanager
def as_os_error() -> Iterator[None]:
    """Turns any error of a library that writes a file into an OSError, as Python's own are."""
    try:
        yield
    except Exception as error:
        raise OSError(first_line(error)) from error


@contextmanager
def writing(path: Path, then: str = "start again") -> Iterator[None]:
    """Turns an OSError inside, of a full disk for instance, into a UserError about the path."""
    try:
        yield
    except OSError as e:
        raise UserError(f"{path} cannot be written ({e.strerror}): fix that, then {then}") from e
