"""What a run writes down: log.txt, metrics.jsonl, and what a tracker gets."""

import json
import os
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from support.common import UserError, say, sync, write_whole
from support.records import STREAMS, read_metrics
from support.trackers import Tracker, open_tracker


class Log:
    """The console, log.txt, metrics.jsonl and a tracker; silent off rank 0.

    log.txt has `{step} {stream} {value}`, as in build-nanogpt. `start` or `resume` first, then
    `record` and `say`, then `close`.
    """

    def __init__(self, log_dir: str | Path, is_main: bool, tracker: str = "none"):
        self.dir = Path(log_dir)
        self.is_main = is_main
        self.text = self.dir / "log.txt"
        self.metrics = self.dir / "metrics.jsonl"
        self.tracker_name = tracker
        self.tracker = Tracker()

    def start(self, run: dict) -> None:
        """Begins a new run: the first line of metrics.jsonl says what it is."""
        if self.is_main:
            self.write([{"type": "run", **run}])
            self.tracker = open_tracker(self.tracker_name, self.dir, run, step=0)

    def resume(self, step: int, evaluated: bool, run: dict, ours: bool = True) -> None:
        """Cuts both files back to a checkpoint's step and goes on from there.

        So no step appears twice. evaluated: whether the evaluations of that very step were done
        before the checkpoint. ours: whether what the files hold is of the same run.
        """

        def stays(record: dict) -> bool:
            if record["type"] == "run" or record["step"] < step:
                return True
            if record["step"] > step or record["type"] in ("train", "end"):
                return False
            return evaluated or record["type"] == "resume"

        if self.is_main:
            records = [record for record in self.read_back() if ours and stays(record)]
            self.write([*records, {"type": "resume", "step": step, **run}])
            self.tracker = open_tracker(self.tracker_name, self.dir, run, step)

    def read_back(self) -> list[dict]:
        """The records so far. A file with lines that are none is kept beside, and said so."""
        if not self.metrics.exists():
            return []
        content = self.metrics.read_bytes()
        records = read_metrics(self.metrics)
        whole_lines = content.count(b"\n")  # what a kill left half-written has no end
        if len(records) < whole_lines:
            aside = self.metrics.with_name(f"damaged_{self.metrics.name}")
            write_whole(aside, content)
            lost = whole_lines - len(records)
            self.say(f"{self.metrics}: {lost} lines are no records; the file is kept as {aside}")
        return records

    def write(self, records: list[dict]) -> None:
        """Makes both files anew, each whole or not at all."""
        lines = [json.dumps(record) for record in records]
        text = [line for record in records if (line := line_of(record))]
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            write_whole(self.metrics, as_bytes(lines))
            write_whole(self.text, as_bytes(text))
        except OSError as error:
            raise cannot_be_written(self.metrics, error) from None

    def record(self, step: int, type: str, **values) -> None:
        """One line in metrics.jsonl and, of training, validation and HellaSwag, in log.txt."""
        if not self.is_main:
            return
        record = {"type": type, "step": step, **values}
        append(self.metrics, json.dumps(record))
        if line := line_of(record):
            append(self.text, line)
        self.tracker.log(step, {f"{type}/{name}": value for name, value in values.items()})

    def sync(self) -> None:
        """Waits until all that is recorded is on the disk."""
        if self.is_main:
            sync(self.text)
            sync(self.metrics)

    def say(self, message: str = "") -> None:
        """Prints on rank 0."""
        if self.is_main:
            say(message)

    def close(self) -> None:
        self.tracker.close()


@contextmanager
def alone_in(log_dir: str | Path, world, patience: float):
    """Holds log_dir for this run: two that write into it would spoil both.

    Rank 0 of `world` holds the lock, which the system releases however the process ends. Raises
    UserError on every rank if another run still has it after `patience` seconds.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(Path(log_dir) / ".lock", timeout=patience)
    owner = Path(log_dir) / ".owner"
    problem = ""
    if world.is_main:
        try:
            Path(log_dir).mkdir(parents=True, exist_ok=True)
            lock.acquire()
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            write_whole(owner, f"process {os.getpid()} of {socket.gethostname()}, {began}".encode())
        except Timeout:
            holder = ""
            with suppress(OSError):
                holder = f" ({owner.read_text()})"
            problem = (
                f"another run{holder} is writing to {log_dir}: "
                "wait for it or stop it, or choose another --log-dir"
            )
        except OSError as error:
            problem = f"{log_dir} cannot be written ({error.strerror}): choose another --log-dir"
        except NotImplementedError:
            say(f"{log_dir}: this file system has no locks: let no other run write here")
    world.raise_together(problem)
    try:
        yield
    finally:
        lock.release()


def line_of(record: dict) -> str:
    """What log.txt has of a record: nothing of samples and the like."""
    name, digits = STREAMS.get(record["type"], ("", 0))
    value = record.get(name)
    if not isinstance(value, (int, float)):
        return ""
    return f"{record['step']} {record['type']} {value:.{digits}f}"


def as_bytes(lines: list[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


def append(path: Path, line: str) -> None:
    try:
        with open(path, "ab") as file:
            file.write(as_bytes([line]))
    except OSError as error:
        raise cannot_be_written(path, error) from None


def cannot_be_written(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} cannot be written ({error.strerror}): mend that, then go on with --resume auto"
    )
