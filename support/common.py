"""What every script shares: mistakes in a sentence, the command line, files written whole."""

import atexit
import hashlib
import inspect
import io
import os
import re
import sys
import traceback
from contextlib import suppress
from dataclasses import field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints


class UserError(ValueError):
    """A mistake that the user can mend: what was found, what was expected, what to do."""


def first_line(error: Exception) -> str:
    """The first line of an error's message; some libraries add a page to it."""
    return str(error).partition("\n")[0].strip()


def run_script(main) -> None:
    """Runs `main` and exits; every script here ends with this call.

    A UserError or any OSError (a failing disk, say) is one line on stderr and exit code 1; other
    errors have their traceback. Where nobody reads stdout any more, the script has done its work.
    """
    open_streams()
    code: str | int | None = 0
    processes = 1
    try:
        processes = count_processes()
        main()
        sys.stdout.flush()
    except SystemExit as end:
        if not end.code and {"-h", "--help"} & set(sys.argv[1:]):  # below the flags, the examples
            print(sys.modules["__main__"].__doc__)
        code = end.code
    except BrokenPipeError:  # `python sample.py | head`: the reader has gone, nothing is wrong
        silence_stdout()
    except (UserError, OSError) as error:
        code = f"{Path(sys.argv[0]).name}: {error}"
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT, the shell's convention
    except Exception:
        traceback.print_exc()
        code = 1
    if processes > 1:
        leave(code)
    sys.exit(code)


def leave(code: str | int | None) -> NoReturn:
    """Exits one of several processes without the interpreter's finalization.

    After an error the finalization may wait for the other processes. After a good end it aborts
    the process if one of gloo's threads needs the GIL then, to free a tensor: they live as long
    as anything refers to their group, as ZeRO, FSDP and torch.distributed.nn do.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    if not code:
        atexit._run_exitfuncs()  # what libraries leave for the end
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code or 0)


def count_processes() -> int:
    """How many torchrun has started. Raises UserError if its variables are not as it sets them.

    A RANK that is left over in a shell would make a run that writes nothing.
    """
    least = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}
    least["TORCHELASTIC_RESTART_COUNT"] = 0
    found = {}
    for name, n in least.items():
        value = os.environ.get(name, str(n))
        if not value.isdecimal() or int(value) < n:
            told = f"the variable {name} is {value!r}, no number from {n} on"
            raise UserError(f"{told}: start with torchrun, or unset {name}")
        found[name] = int(value)
    size = found["WORLD_SIZE"]
    missing = {"RANK", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys() if size > 1 else set()
    if missing or found["RANK"] >= size:
        told = f"the variable WORLD_SIZE is {size}, RANK {found['RANK']}"
        told += "".join(f", {name} is not set" for name in sorted(missing))
        raise UserError(f"{told}: start with torchrun, or unset WORLD_SIZE and RANK")
    return size


def open_streams() -> None:
    """Gives stdin, stdout and stderr something to be, where they were closed (`>&-`).

    Otherwise the next file that is opened would take their place. A console that lacks a character
    of a model's text shows another.
    """
    for name, descriptor in {"stdin": 0, "stdout": 1, "stderr": 2}.items():
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def say(message: str) -> None:
    """Prints; goes on in silence where nobody listens any more (`| head`, a full disk)."""
    try:
        print(message, flush=True)
    except OSError:
        silence_stdout()


def silence_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# -- the command line


def read_flags(config_class, default=None, args: list[str] | None = None):
    """The command line laid over `default`, as an instance of config_class, a dataclass.

    The comment behind a field is the help of its flag. A heading among the fields,
    `# -- batch: what it is about`, opens a box of --help.
    """
    import tyro

    default = default or config_class()
    hints = get_type_hints(config_class, include_extras=True)
    boxes = []
    for title, about, comments in headings(config_class):
        flags = [
            (
                name,
                Annotated[hints[name], tyro.conf.arg(help=comment)],
                field(default=getattr(default, name)),
            )
            for name, comment in comments.items()
        ]
        box = make_dataclass(title, flags)
        box.__doc__ = about
        boxes.append((title, box, field(default_factory=box)))
    all_boxes = make_dataclass("Flags", boxes)
    all_boxes.__doc__ = config_class.__doc__
    given: Any = tyro.cli(all_boxes, args=args, config=(tyro.conf.OmitArgPrefixes,))
    values: dict = {}
    for box in vars(given).values():
        values |= vars(box)
    return config_class(**values)


def headings(config_class: type) -> list[tuple[str, str, dict[str, str]]]:
    """The headings in the source of a dataclass: title, what it is about, {field: its comment}.

    Those of the dataclass that it extends come first.
    """
    names = {f.name for f in fields(config_class)}
    found: list[tuple[str, str, dict[str, str]]] = [("other", "", {})]
    sources = [inspect.getsource(c) for c in config_class.__mro__[::-1] if is_dataclass(c)]
    for line in "\n".join(sources).splitlines():
        heading = re.fullmatch(r"    # -- (\w+): (.+)", line)
        name = re.match(r"    (\w+):", line)
        if heading:
            found.append((heading[1], heading[2], {}))
        elif name and name[1] in names:
            _, _, comment = line.partition("  # ")
            _, _, comments = found[-1]
            comments[name[1]] = comment
    return [part for part in found if part[2]]


# -- files


def write_whole(path: Path, *chunks: bytes) -> str:
    """Writes a file that is there whole or not at all, whatever happens; returns its SHA-256.

    A temporary file beside it is flushed to the disk, then renamed. Raises OSError, and leaves
    what was there before, if the disk is full or does not allow it. What is no file, such as
    /dev/stdout, is written to as it is.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(b"".join(chunks))
        return hashlib.sha256(b"".join(chunks)).hexdigest()
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
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return sha256.hexdigest()


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, read a piece at a time: memory stays flat. Raises OSError."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            sha256.update(chunk)
    return sha256.hexdigest()


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open a directory, and needs no such call
        return
    descriptor = os.open(
        path, os.O_RDONLY if path.is_dir() else os.O_RDWR
    )  # Windows: only what can be written
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
