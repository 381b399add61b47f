"""The same run by different techniques: its losses are the same, its seconds are not.

python -m benchmarks.techniques    eight minutes on two cores, once the quickstart has made its text
                                   FLAGS of train_gpt2.py change all runs. -> log/techniques
"""

import json
import shutil
import sys
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.nn.functional as F

import train_gpt2
from benchmarks import peers
from support.base.console import run_script
from support.base.errors import UserError
from support.base.files import write_whole
from support.base.process import revision
from support.base.programs import run_program
from support.run.log import METRICS, LoggedRun, end_of, read_metrics, read_run
from support.show import plots

OUT = Path("log/techniques")
# the quickstart's model with AdamW; micro-batches of 4 fit four processes
RUN = """
    --preset quickstart --optimizer adamw --learning-rate 1e-3 --weight-decay 0.1 --max-steps 200
    --batch-size 4 --val-every 0 --sample-every 0 --checkpoint-every 0
"""
BY_HAND = "attention written out"
TECHNIQUES = {  # name: flags, processes, and how far a loss may be from the first run's
    BY_HAND: ("--dtype float32 --no-compile", 1, 0.0),
    "fused attention": ("--dtype float32 --no-compile", 1, 1e-4),
    "compiled": ("--dtype float32", 1, 1e-4),
    "bfloat16": ("--dtype bfloat16", 1, 0.02),
    "float16, scaled": ("--dtype float16", 1, 0.02),
    "2 processes": ("--dtype float32", 2, 1e-4),
    "4 processes": ("--dtype float32", 4, 1e-4),
}
LAUNCH = "import sys; from benchmarks import techniques; techniques.train_by_hand(sys.argv[1:])"


def train_by_hand(args: list[str]) -> None:
    """train_gpt2.py with attention as everyone writes it first."""
    with patch.object(F, "scaled_dot_product_attention", peers.written_out):
        train_gpt2.main(args)


def train(program: list[str], flags: list[str], log_dir: Path) -> LoggedRun:
    """Trains RUN with more flags, to its end. Raises UserError if it ends early."""
    print(f"{log_dir} …", file=sys.stderr)
    shutil.rmtree(log_dir, ignore_errors=True)  # an earlier run
    args = [*RUN.split(), f"--log-dir={log_dir.resolve()}", *flags]
    last = run_program([sys.executable, *program, *args], log_dir)
    if end_of(read_metrics(log_dir / METRICS)) != "end":
        raise UserError(f"{log_dir} ended early: {last}")
    return read_run(log_dir)


def train_by(name: str, flags: list[str]) -> LoggedRun:
    own, processes, _ = TECHNIQUES[name]
    program = ["-c", LAUNCH] if name == BY_HAND else ["train_gpt2.py"]
    if processes > 1:
        launcher = f"-m torch.distributed.run --standalone --nproc_per_node {processes}"
        program = [*launcher.split(), *program]
    return train(program, [*own.split(), *flags], OUT / name.replace(", ", "-").replace(" ", "-"))


def make_record(runs: dict[str, LoggedRun]) -> dict[str, Any]:
    """What is drawn of runs, by update, and where they were made."""
    about, *_ = next(iter(runs.values())).records
    record = {key: about[key] for key in ("device", "versions", "config")} | {"git": revision()}
    series = ("loss", "norm", "ms", "wall")
    record["runs"] = {
        name: {field: [float(f"{x:.7g}") for x in run.series(field)[1]] for field in series}
        | {"skipped": run.series("skipped")[0]}  # float16 left these updates out, and their norms
        for name, run in runs.items()
    }
    return record


def keep(record: dict, figure: Any, stem: Path) -> None:
    """Writes a record and its picture, and says where."""
    write_whole(stem.with_suffix(".json"), json.dumps(record).encode())
    plots.save_picture(figure, stem.with_suffix(".png"))
    print(f"record and picture: {stem}.json, .png")


def differences(record: dict) -> dict[str, float]:
    """The largest distance between a loss and the first run's at the same update, by technique."""
    first, *_ = record["runs"].values()
    return {
        name: float(np.abs(np.subtract(run["loss"], first["loss"])).max())
        for name, run in record["runs"].items()
    }


def table(record: dict) -> str:
    lines = ["| technique | last loss | farthest from the first row | may be | ms | skipped |"]
    lines.append("|---|---|---|---|---|---|")
    for (name, run), far in zip(record["runs"].items(), differences(record).values(), strict=True):
        *_, bound = TECHNIQUES[name]
        ms = np.median(run["ms"][1:])  # the first update compiles
        cells = f"{run['loss'][-1]:.4f} | {far:.1e} | {bound:g} | {ms:.0f} | {len(run['skipped'])}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def plot_techniques(record: dict) -> Any:
    """Draws the losses of all runs by update, where they lie on each other, and by seconds."""
    figure, (by_step, by_time) = plots.new_figure(1, 2)
    for (name, run), style in zip(record["runs"].items(), cycle(plots.STYLES)):
        seconds = np.subtract(run["wall"], run["wall"][0])  # without the start, which compiles
        by_step.plot(run["loss"], **style)
        by_time.plot(seconds, run["loss"], label=f"{name}: {seconds[-1]:.0f} s", **style)
        skipped = run["skipped"]
        losses = np.take(run["loss"], skipped)
        by_step.plot(skipped, losses, "x", color=style["color"], ms=7)
        by_time.plot(seconds[skipped], losses, "x", color=style["color"], ms=7)
    plots.label_x(by_step, "step")
    plots.label_x(by_time, "seconds after the first update")
    by_step.set(ylabel=plots.LOSS, title=f"{len(record['runs'])} techniques, one curve")
    by_time.set(title=f"by time ({record['device']['name']})")
    by_time.legend()
    return figure


def main(args: list[str]) -> None:
    record = make_record({name: train_by(name, args) for name in TECHNIQUES})
    print(f"{table(record)}\n")
    keep(record, plot_techniques(record), OUT / "techniques")
    if far := [name for name, x in differences(record).items() if not x <= TECHNIQUES[name][2]]:
        raise UserError(f"farther from the first run than rounding explains: {', '.join(far)}")


if __name__ == "__main__":
    run_script(main)
