"""What a fault may end in, and a quick way to call the scripts: inside this process.

Whatever is typed, damaged or full: a script ends with a right result, or with exit code 1 or 2
(130 for Ctrl-C) and a sentence. There is no traceback, and nothing written before is lost.
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

from support.base.console import run_script

AREAS = [
    "command lines",
    "shards and manifests",
    "checkpoints",
    "weights and tokenizers",
    "changed models",
    "trackers",
    "logs",
    "full disk and permissions",
    "text",
    "sampling and scoring",
    "HTTP",
    "kills",
]
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
    """The outcome of a case. Fails if the contract is broken.

    words: if there are any, the sentence must contain one of them.
    """
    assert done.returncode in OUTCOMES, done
    for noise in NOISE:
        assert noise not in done.stderr, done.stderr
    if done.returncode:
        assert done.stderr.strip() and len(done.stderr) < LONGEST_SENTENCE, done.stderr
        assert not words or any(word in done.stderr for word in words), (words, done.stderr)
    return OUTCOMES[done.returncode]


def assert_told(done: Done, *words: str) -> None:
    """It failed as it should: a sentence with all these words, no traceback."""
    assert done.returncode, done
    judge(done)
    for word in words:
        assert word in done.stderr, done.stderr


def contents(directory: Path) -> dict[str, str]:
    """{path: hash} of all files except locks."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def call(script: str, *args, stdin: bytes = b"") -> Done:
    """Does what `python script.py args` does, in this process. It takes milliseconds."""
    main = importlib.import_module(script.removesuffix(".py")).main
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    with as_a_process([script, *map(str, args)], stdin), redirect_stdout(out), redirect_stderr(err):
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
    printed = [stream.buffer.getvalue().decode(errors="replace") for stream in (out, err)]
    return Done(code or 0, *printed)


@contextmanager
def as_a_process(argv: list[str], stdin: bytes):
    """Afterwards, what belongs to a process is as it was before."""
    before = sys.argv, sys.stdin, os.getcwd(), dict(os.environ)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
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
