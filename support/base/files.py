"""Files written whole, locked, hashed, downloaded."""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.base.console import say_once
from support.base.errors import UserError, writing


def lies_in(path: str | Path, folder: str | Path) -> bool:
    """Whether a path, however it is typed, is this folder or stands directly in it."""
    path = Path(path).resolve()
    return Path(folder).resolve() in (path, path.parent)


def refuse_pointer(path: Path | str) -> None:
    """Raises UserError if a clone without Git LFS has left only the pointer to a file."""
    with open(path, "rb") as file:
        if file.read(24) == b"version https://git-lfs.":
            raise UserError(f"{path} is a pointer of Git LFS: in its clone, git lfs pull")


def write_whole(path: Path, *chunks: bytes) -> str:
    """Writes a file, and makes its directory -> its SHA-256. Raises UserError if that fails.

    The new file is there whole or not at all: a temporary one beside it is synced, then renamed.
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
    """Locks a directory, and makes it. Waits `patience` seconds, then raises UserError(problem)."""
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
