"""How a script runs and what it prints: errors as sentences, a pipe that nobody reads."""

import errno
import os
import select
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from support.base.errors import UsageError, UserError


def run_script(main: Callable[[list[str]], None], at_once: bool = False) -> None:
    """Runs main(args), prints a UserError as sentences, and exits. Every script ends with this."""
    reopen_closed_streams()
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a sample's characters
    code: Any = 0
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except SystemExit as end:
        if not end.code and {"-h", "--help"} & set(sys.argv[1:]):  # the examples follow the flags
            print(sys.modules["__main__"].__doc__)
        code = end.code
    except UserError as error:
        for sentence in error.args:
            print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
        code = 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT, as shells do
    except Exception as error:
        code = 1
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # disk full
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        elif isinstance(error, BrokenPipeError) and reader_has_left():  # `python sample.py | head`
            code = 0
            silence_stdout()
        else:
            with suppress(OSError):  # nobody reads standard error either
                traceback.print_exc()
    if at_once:  # Python's finalization would wait for threads and processes
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code or 0)
    sys.exit(code)


def say(message: str) -> None:
    """Prints. If nobody can read that any more (`| head`, a full disk), falls silent."""
    try:
        print(message, flush=True)
    except OSError:
        silence_stdout()


def reopen_closed_streams() -> None:
    """Opens closed standard streams (`>&-`) on /dev/null, else the next file gets their number."""
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def reader_has_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)  # errors only
    return bool(pipe.poll(0))


def silence_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def duration(seconds: float) -> timedelta:
    """Prints as hours:minutes:seconds."""
    return timedelta(seconds=round(seconds))


def counted(n: int, noun: str, ending: str = "s") -> str:
    """'1 shard' or '2 shards'."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}{ending}"


@lru_cache
def say_once(message: str) -> None:
    print(message, file=sys.stderr)
