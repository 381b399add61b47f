"""What a run writes down: log.txt, metrics.jsonl and a tracker. Reads the two files back, too."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TextIO

from support.base.console import say
from support.base.errors import UserError, first_line, reading, writing
from support.base.files import locked, sync, write_whole

if TYPE_CHECKING:
    from support.machine.distributed import World

# Records of metrics.jsonl that are no measurement. All others are an update or an evaluation.
EVENTS = ("run", "resume", "diverged", "end")
METRICS = "metrics.jsonl"
LOG = "log.txt"
PAGES = ("loss.png", "report.md")  # made from these two
HELLASWAG = 10042  # examples of its validation split
MEASURES = {"val": "val_tokens", "hella": "total"}  # the field that says how much was evaluated
GO_ON = "resume with --resume auto"


@dataclass
class Log:
    """Writes down what a run does. `open_log` makes rank 0's; Log() writes nothing."""

    dir: Path = Path()
    files: tuple[TextIO, ...] = ()  # metrics.jsonl and log.txt, open
    tracker: Any = None

    def record(self, step: int, type: str, **values: Any) -> None:
        """Adds a line to metrics.jsonl, and to log.txt if the first of the values is a number."""
        if not self.files:
            return
        record = {"type": type, "step": step, **values}
        metrics, text = self.files
        with writing(self.dir, GO_ON):
            metrics.write(json.dumps(record) + "\n")
            text.write(line_of(record))
        self.track(**record)

    def track(self, *, step: int, type: str, **values: Any) -> None:
        """Sends a record to the tracker, if there is one."""
        if self.tracker:
            if type == "samples":
                values["samples"] = "\n\n---\n\n".join(values["samples"])
            known = {k: v for k, v in values.items() if isinstance(v, int | float | str)}
            with self.only_watching():
                self.tracker.log({f"{type}/{k}": v for k, v in known.items()}, step=step)

    @contextmanager
    def only_watching(self) -> Iterator[None]:
        """Where the tracker fails inside, the run goes on without it."""
        try:
            yield
        except Exception as error:
            self.tracker = None
            problem = f"{type(error).__name__}: {first_line(error)}"
            say(f"the tracker has failed ({problem}): training goes on without it")

    def sync(self) -> None:
        """Waits until everything recorded is on the disk."""
        with writing(self.dir, GO_ON):
            for file in self.files:
                sync(file.fileno())

    def close(self) -> None:
        if self.tracker:
            with self.only_watching():
                self.tracker.finish()
        # a full disk still refuses the line that it has refused; the other file is closed, too
        with writing(self.dir, GO_ON), ExitStack() as closing:
            for file in self.files:
                closing.enter_context(file)


def open_log(log_dir: Path, records: Iterable[dict], tracker: Any = None) -> Log:
    """Begins both files again with these records, and leaves them open."""
    metrics = log_dir / METRICS
    text = log_dir / LOG
    # a long run's records take ten times the memory of its lines: one at a time
    lines = [(json.dumps(record) + "\n", line_of(record)) for record in records]
    write_whole(metrics, *[line.encode() for line, _ in lines])
    write_whole(text, *[line.encode() for _, line in lines])
    # by lines, so that a reader sees each at once, and a kill loses none
    files = (metrics.open("a", buffering=1), text.open("a", buffering=1))
    return Log(log_dir, files, tracker)


def open_tracker(name: str, log_dir: Path, run: dict, step: int, began: str = "") -> Any:
    """Something with wandb's `log(values, step=…)` and `finish()`, or None.

    run: this start's record. began: the time of the first one. step: where this one resumes, or 0.
    """
    if name == "none":
        return None
    identity = hashlib.sha256(f"{log_dir.resolve()} {began}".encode()).hexdigest()[:16]
    same = {"name": log_dir.name, "id": identity}
    if name == "trackio":  # it knows a run by its name, and a/log and b/log are two
        same = {"name": f"{log_dir.name}-{identity[:6]}"}
    settings = run["config"] | run["model"]
    # not logged in, no network, …
    with reading(f"--tracker {name}", "fix that, or leave it out", failed="does not start"):
        if name == "tensorboard":
            return open_tensorboard(log_dir / "tensorboard", step)
        tracker = importlib.import_module(name)
        tracker.init(project="gpt2", config=settings, resume="allow", **same)
        return tracker


def open_tensorboard(directory: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(directory, purge_step=step)

    def log(values: dict, step: int) -> None:
        for name, value in values.items():
            add = writer.add_text if isinstance(value, str) else writer.add_scalar
            add(name, value, step)

    return SimpleNamespace(log=log, finish=writer.close)


@contextmanager
def alone_in(log_dir: str | Path, world: World, patience: float) -> Iterator[None]:
    """Locks log_dir. Each rank raises UserError if another run keeps it for `patience` seconds."""
    problem = f"another run is writing to {log_dir}: wait for it, or choose another --log-dir"
    with ExitStack() as held:
        with world.fail_together():
            if world.is_main:
                held.enter_context(locked(Path(log_dir), patience, problem))
        yield


def line_of(record: dict) -> str:
    """A record's line of log.txt, as in build-nanogpt; empty for samples and events."""
    value = next((value for key, value in record.items() if key not in ("type", "step")), None)
    if record["type"] in EVENTS or not isinstance(value, int | float):
        return ""
    digits = 6 if record["type"] == "train" else 4
    return f"{record['step']} {record['type']} {value:.{digits}f}\n"


def records_before(log_dir: Path, step: int, evaluated: bool) -> Iterator[dict]:
    """The records that precede a checkpoint: see is_before. A resume keeps only these."""
    path = log_dir / METRICS
    lost = 0
    for line in open_lines(path):
        record = parse_record(line)
        if not record:
            lost += line.endswith("\n")  # a kill only cuts the last line, which then has no end
        elif is_before(record, step, evaluated):
            yield record
    if lost:
        say(f"{path}: damaged lines left out: {lost}")


def is_before(record: dict, step: int, evaluated: bool) -> bool:
    """Whether a record stays in the log of a run that resumes at this step, evaluated or not."""
    at = record.get("step", 0)
    if record["type"] in ("run", "resume"):
        return at <= step
    is_evaluation = record["type"] not in ("train", *EVENTS)
    return at < step or (at == step and is_evaluation and evaluated)


# -- reading back


@dataclass
class LoggedRun:
    """A run, read from its directory. If that has only a log.txt, there are no records."""

    name: str
    streams: dict[str, tuple]  # train, val and hella: the steps and the values, `measured_alike`
    records: list[dict]  # the lines of metrics.jsonl
    config: dict

    def series(self, field: str, type: str = "train") -> tuple[list, list]:
        """Steps and values of a field (lr, norm, …) of a type of record, where it is known."""
        rows = [r for r in self.records if r["type"] == type and r.get(field) is not None]
        return [row["step"] for row in rows], [row[field] for row in rows]

    @property
    def examples(self) -> int:
        """How many of HellaSwag it was scored on; all, if there is only a log.txt."""
        _, totals = self.series("total", "hella")
        return totals[-1] if totals else HELLASWAG


def read_log(path: Path) -> dict[str, tuple]:
    """Reads log.txt, ours or build-nanogpt's."""
    streams: dict = {}
    line = re.compile(r"^(\d+) (\w+) (\d+\.\d+|nan|inf)\n", re.MULTILINE)
    for step, stream, value in line.findall(path.read_text(errors="replace")):
        steps, values = streams.setdefault(stream, ([], []))
        steps.append(int(step))
        values.append(float(value))
    return streams


def open_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file, with their ends; none without the file."""
    if path.exists():
        with path.open(errors="replace") as file:
            yield from file


def parse_record(line: str) -> dict:
    """The record in a line of metrics.jsonl; empty if the line is damaged."""
    with suppress(json.JSONDecodeError):
        record = json.loads(line)
        if isinstance(record, dict) and "type" in record:
            return record
    return {}


def read_metrics(path: Path, updates: bool = True) -> list[dict]:
    """The records of metrics.jsonl, or those that are no updates. Skips damaged lines."""
    lines = open_lines(path)
    if not updates:  # of a long run they take a GB
        lines = (line for line in lines if not line.startswith('{"type": "train"'))
    return list(filter(None, map(parse_record, lines)))


def end_of(records: list[dict]) -> str:
    """How a run has ended: "end" or "diverged"; empty if it has not."""
    last = records[-1]["type"] if records else ""
    return last if last in ("end", "diverged") else ""


def starts_of(records: list[dict]) -> list[dict]:
    """The records of the run's start and of each resume."""
    return [record for record in records if record["type"] in ("run", "resume")]


def measured_alike(records: list[dict], type: str) -> list[dict]:
    """The evaluations of a type in MEASURES that were made on as much as the last: a resumed run
    may use another amount, and numbers of different amounts are not compared."""
    field = MEASURES[type]
    found = []
    setting = None
    for record in records:
        setting = record.get("config", {}).get(field, setting)
        if record["type"] == type:
            found.append((record.get(field, setting), record))  # older ones do not say it
    return [record for amount, record in found if amount == found[-1][0]]


def read_run(directory: str | Path, updates: bool = True, **config: Any) -> LoggedRun:
    """Reads a run's directory, or a log like log.txt, of a run with this `config`."""
    directory = Path(directory)
    if directory.is_file():
        if not (streams := read_log(directory)):
            raise UserError(f"{directory} has no line like '250 val 3.2841', as log.txt has them")
        return LoggedRun(directory.stem, streams, [], config)
    records = read_metrics(directory / METRICS, updates)
    streams = read_log(directory / LOG)
    for type in MEASURES.keys() & streams.keys():
        if alike := {record["step"] for record in measured_alike(records, type)}:
            points = [(step, y) for step, y in zip(*streams[type], strict=True) if step in alike]
            streams[type] = tuple(map(list, zip(*points, strict=True)))
    last = [{}, *starts_of(records)][-1]
    config = last.get("config", {}) | last.get("model", {}) | config  # --init-from has own sizes
    return LoggedRun(directory.name, streams, records, config)


def read_runs(*patterns: str) -> list[LoggedRun]:
    """Reads all matching directories and logs: read_runs("runs/*", "log/quickstart", "a.txt")."""
    paths = [Path(path) for pattern in patterns for path in sorted(glob(pattern))]
    paths = [path for path in paths if path.suffix == ".txt" or (path / LOG).exists()]
    if not paths:
        raise FileNotFoundError(f"no run in {patterns}: make quickstart makes log/quickstart")
    runs = [read_run(path) for path in paths]
    names = [run.name for run in runs]
    full = zip(runs, paths, strict=True)  # names of runs that share theirs
    return [replace(run, name=str(p)) if names.count(run.name) > 1 else run for run, p in full]
