"""Files that others publish, and whose content is known beforehand by its git blob id."""

import hashlib
import time
from pathlib import Path

from tqdm import tqdm

from support.common import UserError, write_whole
from support.web import connect, read_content


def download_once(
    path: Path, url: str, expected: str, *, title, instead, attempts, patience
) -> Path:
    """Fetches a file to `path`, unless it is already there. Returns `path`.

    expected: the file's git blob id. title, instead: what messages call it, and tell to do without
    it. A transfer that fails is tried again after `patience` seconds, then after twice as many.
    Raises UserError if there is no network (within seconds), if every attempt failed, and for a
    file whose content does not have the expected id.
    """
    if path.exists():
        found = blob_id(read_local(path))
        if found != expected:
            raise UserError(
                f"{path} is not the official file (blob id {found}, not {expected}): "
                "delete it to fetch it anew"
            )
        return path
    content, problem = fetch_patiently(url, expected, attempts, patience)
    if problem:
        raise UserError(f"{title} cannot be had from {url} ({problem}): {instead}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        problem = f"{title} cannot be written to {path.parent} ({error}): {instead}"
        raise UserError(problem) from None
    return path


def read_local(path: Path) -> bytes:
    """The content of a file. Raises UserError if it is no file, or cannot be read."""
    try:
        if path.is_file():
            return path.read_bytes()
        problem = "it is no file"
    except OSError as error:
        problem = str(error.strerror)
    raise UserError(f"{path} cannot be read ({problem}): delete it to fetch it anew")


def fetch_patiently(url: str, expected: str, attempts: int, patience: float) -> tuple[bytes, str]:
    """The content of a URL, and the last attempt's problem ("" if none)."""
    for attempt in range(attempts):
        if attempt > 0:
            time.sleep(patience * 2 ** (attempt - 1))
        content, problem, try_again = fetch(url)
        if not problem:
            found = blob_id(content)
            if found == expected:
                return content, ""
            problem = f"{len(content)} bytes with blob id {found} came, {expected} was expected"
        if not try_again:
            break
    return b"", problem


def fetch(url: str, seconds: float = 5) -> tuple[bytes, str, bool]:
    """One attempt: the content, the problem ("" if none), and whether to try again may help."""
    import requests

    try:
        answer = connect(url, seconds)
    except TimeoutError as error:
        return b"", str(error), False
    except requests.ConnectionError as error:
        return b"", f"no connection: {type(error).__name__}", False
    except Exception as error:  # a redirect, say, that makes no sense
        return b"", f"no usable answer: {type(error).__name__}", False
    if answer.status_code != 200:
        busy = answer.status_code >= 500 or answer.status_code == 429
        return b"", f"HTTP {answer.status_code} {answer.reason}", busy
    name = url.rsplit("/", 1)[-1]
    size = answer.raw.length_remaining  # None if unknown
    bar = tqdm(total=size, unit="B", unit_scale=True, desc=name, leave=False, disable=None)
    try:
        with bar:
            return read_content(answer, bar.update), "", True
    except TimeoutError as error:
        return b"", str(error), False
    except Exception as error:
        return b"", f"the transfer broke off: {type(error).__name__}", True


def blob_id(content: bytes) -> str:
    """What git calls this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
