"""Processes that work ahead of who needs their results, and that end when their parent ends."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress

from support.common import UserError, run_script

starting = threading.RLock()  # held while a process is started


def start_pool(workers: int, prepare: Callable, argument) -> ProcessPoolExecutor:
    """Starts the processes; each of them calls prepare(argument) before it works.

    Call this before there are threads, which a fork breaks. Raises UserError if the system does
    not allow so many processes.
    """
    # no warning about the semaphores that a killed process leaves
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    try:
        pool = ProcessPoolExecutor(workers, initializer=start_worker, initargs=(prepare, argument))
        with starting, ctrl_c_blocked():
            started = pool.submit(os.getpid)  # the first work makes it fork
        started.result()
    except OSError as error:
        told = f"{workers} workers cannot be started ({error.strerror})"
        raise UserError(f"{told}; try fewer --workers") from None
    return pool


@contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """Goes around what starts a process: Ctrl-C does not reach that, not even while it imports.

    A process starts with those signals blocked that are blocked in the thread that starts it.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(prepare: Callable, argument) -> None:
    """Prepares a worker: it leaves Ctrl-C to its parent, and ends when the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    prepare(argument)


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent, "only workers call this"
    parent.join()
    os._exit(1)


def map_ahead(pool: ProcessPoolExecutor, work: Callable, items: Iterator, ahead: int) -> Iterator:
    """Yields (key, work(value)) for each (key, value) of the items, in order.

    Meanwhile a thread takes up to `ahead` more and gives them to the workers. An error in taking
    one is raised only after all that was taken before it has been yielded. Raises BrokenProcessPool
    if a worker was killed.
    """
    taker = ThreadPoolExecutor(1)
    workers = set(multiprocessing.active_children())

    def start_next() -> tuple[object, Future] | None:
        item = next(items, None)
        if item is None:
            return None
        key, value = item
        with starting, ctrl_c_blocked():  # a pool that does not fork may start one more worker
            return key, pool.submit(work, value)

    started = deque(taker.submit(start_next) for _ in range(ahead))
    while item := started.popleft().result():
        started.append(taker.submit(start_next))
        key, future = item
        yield key, wait_for_result(future, workers)


def wait_for_result(future: Future, workers: set[multiprocessing.process.BaseProcess]):
    """What the future brings. Raises BrokenProcessPool if one of the workers is gone.

    The pool says so itself, but not of one that was killed while it handed over a result: it would
    wait for the rest of that for ever. So who waits looks at the workers once a second.
    """
    while True:
        try:
            return future.result(timeout=1)
        except NotYet:
            if future.done():  # an error of the work itself
                raise
        workers.update(multiprocessing.active_children())  # some systems start them one by one
        if not all(worker.is_alive() for worker in workers):
            raise BrokenProcessPool("a worker was killed")


def count_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -- the end of a script with workers


def run_and_exit(main: Callable[[], None], interrupted: str) -> None:
    """Calls `main`, and then ends at once, whatever the threads and the workers are at.

    Left to itself, Python would wait for a hub that stalls, and a stream broken off can make it
    hang (apache/arrow#45214). interrupted: what Ctrl-C prints.
    """

    def end_at_ctrl_c(*_) -> None:
        with suppress(OSError):  # nobody reads it
            # not print, which may have been interrupted itself
            os.write(2, f"\n{interrupted}\n".encode())
        end_process(130)  # 128 + SIGINT, the shell's convention

    signal.signal(signal.SIGINT, end_at_ctrl_c)
    code: int | str = 0
    try:
        run_script(main)
    except SystemExit as end:
        code = end.code or 0
    if isinstance(code, str):
        with suppress(OSError):
            print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        if stream:
            with suppress(OSError):  # nobody reads it any more, but the work is done
                stream.flush()
    end_process(code)


def end_process(code: int) -> None:
    """Ends this process at once, whatever its threads and its workers are at.

    Only the start of a worker is waited for: one that got half of its orders would complain.
    """
    with starting:
        os._exit(code)
