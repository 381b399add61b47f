"""What a fault may end in, and a quick way to call the scripts: in this very process.

Whatever is typed, damaged, full or closed: a script ends with a right result, or with exit code 1
or 2 (130 for Ctrl-C) and a sentence; there is no traceback, and what was written before stays.
"""

import hashlib
import importlib
import io
import os
import signal
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from support.common import run_script

AREAS = {  # and the fewest cases of each
    "command lines": 600,
    "shards and manifests": 150,
    "checkpoints": 200,
    "logs": 40,
    "streams and environment": 40,
    "full disk and permissions": 20,
    "numbers": 40,
    "text": 5000,
    "sampling and scoring": 100,
    "HTTP": 20,
    "kills": 30,
}
RIGHT = "right result"
TOLD = "exit 1, a sentence"
USAGE = "exit 2, a sentence"
INTERRUPTED = "exit 130"
OUTCOMES = {0: RIGHT, 1: TOLD, 2: USAGE, 130: INTERRUPTED}
NOISE = ("Traceback", "most recent call last", "Error in sys.excepthook", "Exception ignored")
LONGEST_SENTENCE = 4000  # characters: of all problems together


@dataclass
class Done:
    """How a script ended."""

    returncode: int
    stdout: str
    stderr: str


def judge(done: Done, *words: str) -> str:
    """The outcome of a case; fails where the contract is broken.

    words: at least one of them has to be in the sentence, as what was wrong.
    """
    assert done.returncode in OUTCOMES, done
    for noise in NOISE:
        assert noise not in done.stderr, done.stderr
    if done.returncode:
        assert done.stderr.strip() and len(done.stderr) < LONGEST_SENTENCE, done.stderr
        assert not words or any(word in done.stderr for word in words), (words, done.stderr)
    return OUTCOMES[done.returncode]


def contents(directory: Path) -> dict[str, str]:
    """{path: hash} of all files, without those that only say who is at work."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in (".lock", ".owner")
    }


def call(script: str, *args, stdin: bytes = b"", environ: dict | None = None) -> Done:
    """What `python script.py args` does, in this process: it costs milliseconds."""
    main = importlib.import_module(script.removesuffix(".py")).main
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    with as_a_process([script, *map(str, args)], stdin), redirect_stdout(out), redirect_stderr(err):
        os.environ.update(environ or {})
        try:
            run_script(main)
            code: str | int | None = 0
        except SystemExit as end:
            code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
        sys.stderr.flush()
        sys.stdout.flush()
    said = [stream.buffer.getvalue().decode(errors="replace") for stream in (out, err)]
    return Done(code or 0, *said)


@contextmanager
def as_a_process(argv: list[str], stdin: bytes):
    """Inside, what belongs to a process may change; afterwards it is as it was."""
    before = sys.argv, sys.stdin, os.getcwd(), dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.argv = argv
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
    try:
        yield
    finally:
        sys.argv, sys.stdin, folder, environ = before
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        for number, handler in handlers.items():
            signal.signal(number, handler)
