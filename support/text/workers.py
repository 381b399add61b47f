"""Worker processes. They compute results ahead of time, and end with their parent."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from support.base.console import run_script


def start_pool(workers: int, prepare: Callable, *arguments: object) -> ProcessPoolExecutor:
    """Starts processes that first call prepare(*arguments). Start threads after this."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")  # at os._exit
    start: Callable = start_worker
    pool = ProcessPoolExecutor(workers, initializer=start, initargs=(prepare, *arguments))
    pool.submit(os.getpid).result()  # the pool forks at its first work
    return pool


def start_worker(prepare: Callable, *arguments: object) -> None:
    """Prepares a worker. It leaves Ctrl-C to its parent, and ends when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    prepare(*arguments)


def end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def map_ahead(pool: ProcessPoolExecutor, work: Callable, items: Iterator, ahead: int) -> Iterator:
    """Yields (key, work(*arguments)) for each (key, arguments) of the items, in order.

    A thread takes up to `ahead` items early. Its errors are raised after the results before them.
    Raises BrokenProcessPool if a worker was killed.
    """
    taker = ThreadPoolExecutor(1)
    workers = set(multiprocessing.active_children())
    tasks = ((key, pool.submit(work, *arguments)) for key, arguments in items)
    started = deque(taker.submit(next, tasks, None) for _ in range(ahead))
    while task := started.popleft().result():
        started.append(taker.submit(next, tasks, None))
        key, future = task
        # a pool does not notice a worker that was killed while it handed over its result
        while not wait([future], timeout=1).done:
            alive = set(multiprocessing.active_children())
            if workers - alive:
                raise BrokenProcessPool("a worker was killed")
            workers = alive  # some systems start workers one by one
        yield key, future.result()


def run_and_exit(main: Callable[[list[str]], None]) -> None:
    """Runs `main`, then ends at once: Python could hang by threads of Arrow (arrow#45214)."""
    signal.signal(signal.SIGINT, end_at_ctrl_c)
    run_script(main, at_once=True)


def end_at_ctrl_c(*_: object) -> None:
    os.write(2, b"\ninterrupted: the same command resumes from the last whole shard\n")
    os._exit(130)  # 128 + SIGINT, the shell's convention
