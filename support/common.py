"""What every script shares: a mistake in one sentence, flags in range, files written whole."""

import errno
import hashlib
import inspect
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, make_dataclass
from datetime import timedelta
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints


class UserError(ValueError):
    """What the user can fix. Each sentence says what was found, what was expected, what to do."""

    def __str__(self) -> str:
        return "; ".join(self.args)


class UsageError(UserError):
    """Flags that cannot be right, a sentence each. The script exits with 2."""


def first_line(error: Exception) -> str:
    """The first line of an error's message. Some libraries add a page to it."""
    return str(error).partition("\n")[0].strip()


def run_script(main: Callable[[list[str]], None], at_once: bool = False) -> None:
    """Runs main(args) with the command line's arguments and exits. Every script ends with this.

    A UserError becomes a line on stderr for each sentence. Other errors keep their traceback, but
    for a full disk: it is no fault of ours.
    at_once: exits without Python's finalization, which would wait for threads and processes.
    """
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
    except BrokenPipeError:  # `python sample.py | head`: the reader has left, nothing is wrong
        silence_stdout()
    except UserError as error:
        for sentence in error.args:
            print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
        code = 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT, as shells do
    except Exception as error:
        full = (errno.ENOSPC, errno.EDQUOT)
        if isinstance(error, OSError) and error.errno in full:  # the disk of the output
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        code = 1
    if at_once:
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
    """Opens standard streams that were closed (`>&-`, a daemon's) on /dev/null.

    Otherwise they are None, and the next file that is opened would get their number.
    """
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def silence_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def duration(seconds: float) -> timedelta:
    """Prints as hours:minutes:seconds."""
    return timedelta(seconds=round(seconds))


def counted(n: int, noun: str, ending: str = "s") -> str:
    """'1 shard' or '2 shards'."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}{ending}"


def find_in(path: str, pattern: str) -> str:
    """What the pattern's group matches in a file of the Linux kernel; empty if there is nothing."""
    file = Path(path)
    match = re.search(pattern, file.read_text()) if file.exists() else None
    return match[1] if match else ""


def usable_cores() -> int:
    """The cores that this process may use: a container or a cluster may not give it all."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    if limit := find_in("/sys/fs/cgroup/cpu.max", r"(\d+ \d+)"):  # a container's, or it says "max"
        quota, period = map(int, limit.split())
        cores = min(cores, math.ceil(quota / period))
    return cores


def as_typed(program: str) -> str:
    """A program beside this Python, as one types it: with its path, if it is below this directory,
    because its environment may not be activated."""
    path = Path(sys.executable).with_name(program)
    if path.is_relative_to(Path.cwd()):
        return shlex.quote(str(path.relative_to(Path.cwd())))
    return program


def beside_script(name: str) -> str:
    """The path of a script, as one types it where the running one was started; for a shell."""
    return shlex.quote(str(Path(sys.argv[0]).with_name(name)))


def command_for(script: str) -> str:
    """What one types to run another script of this repository."""
    return f"{as_typed('python')} {beside_script(script)}"


def without(args: list[str], *flags: str) -> list[str]:
    """The arguments without these flags and their values."""

    def is_out(arg: str) -> bool:
        return arg.partition("=")[0].replace("_", "-") in flags

    pairs = [(before, arg) for before, arg in pairwise(["", *args]) if not is_out(arg)]
    return [arg for before, arg in pairs if arg[:2] == "--" or "=" in before or not is_out(before)]


def new_run_from(checkpoint: Path) -> str:
    """What to do with a checkpoint that cannot be resumed."""
    flags = shlex.join(["--init-from", str(checkpoint)])
    return f"start a new run with its weights: {flags}, another --log-dir, no --resume"


@lru_cache(maxsize=1)  # the code that runs is the one that was imported
def revision() -> str:
    """The commit of this code, marked if it was changed since; empty without git."""
    if not shutil.which("git"):
        return ""
    command = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent
    return subprocess.run(command, capture_output=True, text=True, cwd=here).stdout.strip()


# -- flags


@dataclass(frozen=True)
class Range:
    """The values that a flag may have, both ends included: Annotated[int, Range(1, 64)]."""

    low: float
    high: float = 10**12  # steps, tokens, …: a larger number is a slip of the finger
    above: bool = False  # without the lower end

    def __contains__(self, x: float | str) -> bool:
        if isinstance(x, str):  # a word that the flag knows, such as auto
            return True
        return self.low <= x <= self.high and not (self.above and x == self.low)

    def __str__(self) -> str:
        low = "above" if self.above else "at least"
        return f"{low} {self.low:,} and at most {self.high:,}"


Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]  # 0 has a meaning of its own: off, all, or automatic
Amount = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
Fraction = Annotated[float, Range(0, 1, above=True)]


def out_of_range(config: Any) -> list[str]:
    """The flags of a dataclass that are outside the Range in their type, a sentence each."""
    problems = []
    for name, annotation in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        for allowed in getattr(annotation, "__metadata__", ()):
            if isinstance(allowed, Range) and value not in allowed:
                problems.append(f"--{name.replace('_', '-')} {value}: it must be {allowed}")
    return problems


def read_flags(config_class: type, args: list[str], default: Any = None, about: str = "") -> Any:
    """The command line as a dataclass. Where bases have all its fields, each is a box of --help."""
    import tyro

    default = default or config_class()
    about = about or config_class.__doc__ or ""
    groups = [base for base in config_class.__mro__[-1:0:-1] if inspect.get_annotations(base)]
    if not groups:
        return tyro.cli(config_class, default=default, args=args, description=about)
    boxes = []
    for group in groups:
        defaults = {f.name: getattr(default, f.name) for f in fields(group)}
        box = Annotated[group, tyro.conf.OmitArgPrefixes]  # type: ignore[valid-type]
        boxes.append((group.__name__, box, field(default_factory=partial(group, **defaults))))
    found: Any = tyro.cli(make_dataclass("Boxes", boxes), args=args, description=about)
    return config_class(**{k: v for box in vars(found).values() for k, v in vars(box).items()})


def parse_flags(config_class: type, args: list[str]) -> Any:
    """The command line as a dataclass. Raises UsageError for values that are out of range."""
    config = read_flags(config_class, args)
    problems = out_of_range(config)
    typed = [arg.partition("=")[0].replace("_", "-") for arg in args]
    for name, kind in get_type_hints(config_class, include_extras=True).items():
        flag = f"--{name.replace('_', '-')}"
        if get_origin(kind) is not tuple or flag not in typed:
            continue
        if typed.count(flag) > 1:  # tyro would take the last one
            problems.append(f"{flag} is given twice: name all after one {flag}")
        if not getattr(config, name):
            problems.append(f"{flag} names nothing")
    if problems:
        raise UsageError(*problems)
    return config


# -- files


def lies_in(path: str | Path, folder: str | Path) -> bool:
    """Whether a path, however it is typed, is this folder or stands directly in it."""
    path = Path(path).resolve()
    return Path(folder).resolve() in (path, path.parent)


# where messages of PyTorch and NumPy go on to advise loading the file unsafely, which runs its code
UNSAFE = re.compile(r"This file can still|In PyTorch 2\.6|If you trust")


@contextmanager
def reading(name: str | Path, advice: str = "fix that, then start again") -> Iterator[None]:
    """Turns any error of a library into one sentence: `name` cannot be read, and why."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = UNSAFE.split(str(error))[0]
        reason = f"{type(error).__name__}: {textwrap.shorten(said, 400)}"
        raise UserError(f"{name} cannot be read ({reason}); {advice}") from error


def refuse_pointer(path: Path | str) -> None:
    """Raises UserError if a clone without Git LFS has left only the pointer to a file."""
    with open(path, "rb") as file:
        if file.read(24) == b"version https://git-lfs.":
            raise UserError(f"{path} is a pointer of Git LFS: in its clone, git lfs pull")


@contextmanager
def writing(path: Path, then: str = "start again") -> Iterator[None]:
    """Turns an OSError inside, of a full disk for instance, into a UserError about the path."""
    try:
        yield
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror})"
        raise UserError(f"{problem}: fix that, then {then}") from error


def write_whole(path: Path, *chunks: bytes) -> str:
    """Writes a file that is there whole or not at all, whatever happens; returns its SHA-256.

    It writes a temporary file beside it, flushes that to the disk, and renames it. It makes the
    directory, too. If that fails, the old file stays, and UserError is raised.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    sha256 = hashlib.sha256()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(beside, "wb") as file:
                for chunk in chunks:
                    sha256.update(chunk)
                    file.write(chunk)
                file.flush()
                sync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    return sha256.hexdigest()


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, read in pieces: memory stays flat."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            sha256.update(chunk)
    return sha256.hexdigest()


# what a file system says that cannot do what is asked (network, FUSE)
UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.ENOLCK, errno.EBADF}


@contextmanager
def if_supported(what: str) -> Iterator[None]:
    """Tries what is not needed for the data to be whole. If it is refused, says so once."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        say_once(f"this file system refuses {what} ({error.strerror}); going on without")


@lru_cache
def say_once(message: str) -> None:
    print(message, file=sys.stderr)


def sync(file: Path | int) -> None:
    """Waits until a file, or the entries of a directory, are on the disk. file: or a descriptor."""
    descriptor = file if isinstance(file, int) else os.open(file, os.O_RDONLY)
    try:
        with if_supported("fsync, so a power cut may lose what was just written"):
            os.fsync(descriptor)
    finally:
        if not isinstance(file, int):
            os.close(descriptor)


@contextmanager
def locked(folder: Path, patience: float, problem: str) -> Iterator[None]:
    """Locks a directory, and makes it. Any end of the process unlocks it.

    Raises UserError(problem) if another process still holds the lock after `patience` seconds.
    """
    from filelock import FileLock, Timeout

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    # no soft lock where locks are missing: what a killed process leaves would lock others out
    lock = FileLock(folder / ".lock", timeout=patience, fallback_to_soft=False)
    with if_supported("locks, so let no other process write here"):
        try:
            lock.acquire()
        except (Timeout, FileNotFoundError):  # or it has just failed, and removed its folder
            raise UserError(problem) from None
    try:
        yield
    finally:
        lock.release()


def download(url: str) -> bytes:
    """The content behind a URL. Asks a busy server three times. Raises OSError."""
    import requests
    from requests.adapters import HTTPAdapter, Retry

    retry = Retry(2, connect=0, backoff_factor=1, status_forcelist=[429, 500, 502, 503, 504])
    with requests.Session() as session:
        session.mount(url, HTTPAdapter(max_retries=retry))
        response = session.get(url, timeout=(3, 20))  # seconds to connect, and without a byte
        response.raise_for_status()
    return response.content
