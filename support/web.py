"""Text from a network that fails: an error within a limited time, and then another attempt."""

import itertools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial

from support.common import UserError

SILENCE = 20  # seconds without a byte, after which the connection counts as lost
WINDOW = 60  # in so many seconds …
LEAST = 2**18  # … so many bytes have to come: 4 kB a second
MOST = 2**30  # bytes; what is larger, perhaps without an end, would fill the memory
CHUNK = 2**14  # bytes that are read at a time


def fetch(url: str, seconds: float = 30) -> bytes:
    """The content of a URL. Raises OSError or ValueError, as `connect` and `read_content` do."""
    answer = connect(url, seconds)
    answer.raise_for_status()  # of 400 and more
    if answer.status_code != 200:
        raise OSError(f"HTTP {answer.status_code} {answer.reason}")
    if answer.raw.length_remaining is None and not answer.raw.chunked:
        raise OSError("the server does not say how long it is")  # so half of it might come
    return read_content(answer)


def connect(url: str, seconds: float):
    """The answer of a server, a `requests.Response` whose content is still to be read.

    Raises TimeoutError after `seconds`, otherwise what `requests` raises: OSError, and for an
    address that makes no sense, be it in a redirect, ValueError.
    """
    import requests

    # in a thread: a dead name server, or many dead addresses in turn, outlast requests' own timeout
    get = partial(requests.get, url, stream=True, timeout=(seconds, SILENCE))
    answering = call_in_thread(get)
    if not wait([answering], seconds).done:
        raise TimeoutError(f"no answer within {seconds} seconds")
    return answering.result()


def read_content(answer, advance: Callable = lambda count: None) -> bytes:
    """The content of an answer; `advance` is told of the bytes as they come.

    Raises TimeoutError if it stalls, and OSError if it ends too early, has no end, or cannot be
    decompressed.
    """
    content = bytearray()
    reading = call_in_thread(partial(read_into, content, answer, advance))
    while True:
        before = len(content)
        if wait([reading], WINDOW).done:
            reading.result()
            return bytes(content)
        came = len(content) - before
        if came < LEAST:
            if hasattr(answer.raw, "shutdown"):  # since urllib3 2.3; it ends the thread
                answer.raw.shutdown()
            raise TimeoutError(f"it stalls: {came} bytes in {WINDOW} seconds")


def read_into(content: bytearray, answer, advance: Callable) -> None:
    with answer:
        for chunk in answer.iter_content(CHUNK):
            content += chunk
            advance(len(chunk))
            if len(content) > MOST:
                raise OSError(f"it has more than {MOST} bytes")


def call_in_thread(call: Callable) -> Future:
    """What call() will return or raise. Unlike an executor's, the thread keeps no process alive."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# -- another attempt

WAITS = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)  # seconds before the network is tried again


def read_patiently(name: str, read: Callable[[], Iterator], done: int = 0) -> Iterator:
    """Yields what read() yields, without the first `done` items.

    Where the network fails it waits, longer each time, and then goes on where it was. Raises
    UserError where waiting does not help.
    """
    waits = WAITS if re.match("(hub|hf|https?):", name) else ()
    failures = 0
    while True:
        try:
            for item in itertools.islice(read(), done, None):
                yield item
                done += 1
                failures = 0
            return
        except UserError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            if failures == len(waits) or is_final(error):
                told = f"{name} cannot be read ({reason})"
                raise UserError(f"{told}; that mended, the same command goes on") from error
        wait = waits[failures]
        failures += 1
        again = f"trying again in {wait} s, {failures} of {len(waits)} times"
        print(f"\n{name}: {reason}; {again}", file=sys.stderr)
        time.sleep(wait)


def is_final(error: Exception) -> bool:
    """Whether another attempt would fail, too: nothing is there, or it may not be read."""
    response = getattr(error, "response", None)
    refused = getattr(response, "status_code", 0) in (401, 403, 404)
    return refused or isinstance(error, FileNotFoundError)
