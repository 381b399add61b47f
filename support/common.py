"""What every script shares: a user's mistake in one sentence, and files that are written whole."""

import atexit
import hashlib
import io
import os
import sys
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path


class UserError(ValueError):
    """A mistake that the user can fix. It says what was found, what was expected, what to do."""


def first_line(error: Exception) -> str:
    """The first line of an error's message. Some libraries add a page to it."""
    return str(error).partition("\n")[0].strip()


def run_script(main, at_once: bool = False) -> None:
    """Runs `main` and exits. Every script ends with this call.

    A UserError or an OSError (a full disk, say) becomes one line on stderr and exit code 1. Other
    errors keep their traceback. at_once: exit without waiting for threads and child processes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console may lack a character of a sample
    code: str | int | None = 0
    try:
        main()
        sys.stdout.flush()
    except SystemExit as end:
        if not end.code and {"-h", "--help"} & set(sys.argv[1:]):  # the examples follow the flags
            print(sys.modules["__main__"].__doc__)
        code = end.code
    except BrokenPipeError:  # `python sample.py | head`: the reader has left, nothing is wrong
        silence_stdout()
    except (UserError, OSError) as error:
        code = f"{Path(sys.argv[0]).name}: {error}"
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT, as shells do
    except Exception:
        traceback.print_exc()
        code = 1
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several and not code:
        atexit._run_exitfuncs()
    if several or at_once:
        leave(code)
    sys.exit(code)


def leave(code: str | int | None) -> None:
    """Exits without Python's finalization.

    After an error, finalization would wait for the other processes. After success, Python would
    abort if a gloo thread still frees a tensor: such threads live as long as anything refers to
    their process group.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)


def say(message: str) -> None:
    """Prints. If nobody reads the output any more (`| head`, a full disk), goes on in silence."""
    try:
        print(message, flush=True)
    except OSError:
        silence_stdout()


def silence_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def duration(seconds: float) -> timedelta:
    """Prints as hours:minutes:seconds."""
    return timedelta(seconds=round(seconds))


# -- files


def write_whole(path: Path, *chunks: bytes) -> str:
    """Writes a file that is there whole or not at all, whatever happens; returns its SHA-256.

    It writes a temporary file beside it, flushes that to the disk, and renames it. If the disk is
    full or read-only, the old file stays, and OSError is raised.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    sha256 = hashlib.sha256()
    try:
        with open(beside, "wb") as file:
            for chunk in chunks:
                sha256.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        error.filename = str(path)  # a full disk names no file, and nobody knows the temporary one
        raise
    return sha256.hexdigest()


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, read in pieces: memory stays flat."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            sha256.update(chunk)
    return sha256.hexdigest()


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
