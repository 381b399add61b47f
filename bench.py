"""The scoreboard: how fast is a training step here, and how far is that from the hardware's limit?

python bench.py                            each technique added in turn, up to what training uses
python bench.py --against hf --generate    other comparisons, see --help
"""

import json
import os
import random
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import peers
from benchmarks.measure import Side, measure
from config import GPT2_SIZES
from hellaswag import iterate_examples
from model import GPT, GPTConfig
from support.common import Count, CountOrZero, parse_flags, run_script, write_whole
from support.compile import why_not_compile
from support.device import peak_flops, pick_device, pick_dtype
from support.distributed import World
from support.plots import BLACK, BLUE, PALE, new_figure, save_picture
from support.report import describe_run

MODELS = GPT2_SIZES | {"tiny": dict(n_layer=2, n_head=2, n_embd=64)}


@dataclass
class BenchConfig:
    """Measures hot paths. Without flags, adds one technique after another to a training step."""

    # hf: compare with transformers' GPT-2, compiled and eager; nanogpt: with the clone in --peer
    against: Literal["", "hf", "nanogpt"] = ""
    peer: str = ""  # a clone of https://github.com/karpathy/nanoGPT
    sweep: Literal["", "batch"] = ""  # batch: try micro-batches of 1, 2, 4, … up to --max-batch
    scaling: bool = False  # train on 1, 2, 4, 8 processes, one per GPU (a CPU is shared)
    generate: bool = False  # generate 128 tokens, also with transformers
    hellaswag: bool = False  # score HellaSwag one example at a time, and in batches

    model: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "tiny"] = "gpt2"  # which size
    batch_size: CountOrZero = 0  # micro-batch B; 0 = 4 on a CPU, 16 on a GPU
    sequence_length: CountOrZero = 0  # T; 0 = 256 on a CPU, 1024 on a GPU
    max_batch: CountOrZero = 0  # the largest micro-batch of --sweep; 0 = 16 on a CPU, 128 on a GPU
    rounds: Count = 3  # how often each side is measured, in alternation
    hellaswag_path: str = ""  # a .jsonl file of HellaSwag; empty = download it
    examples: Count = 48  # of HellaSwag, drawn at random

    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto = as in training
    compile: bool = True  # use torch.compile, where there is a compiler
    out: str = "log/bench"  # write the results to OUT.json, and ratios also to OUT.png


class Machine:
    """The flags, with their defaults filled in, and what this machine can do."""

    def __init__(self, config: BenchConfig):
        self.device = pick_device(config.device)
        self.on_cpu = self.device.type == "cpu"
        self.on_gpu = self.device.type == "cuda"
        self.config = replace(
            config,
            batch_size=config.batch_size or (4 if self.on_cpu else 16),
            sequence_length=config.sequence_length or (256 if self.on_cpu else 1024),
            max_batch=config.max_batch or (16 if self.on_cpu else 128),
        )
        self.size = MODELS[config.model]
        self.dtype, self.why = pick_dtype(self.device, config.dtype)  # as in training
        self.compile = config.compile and not why_not_compile(self.device)
        torch.set_float32_matmul_precision("high")  # as in training
        self.peak, self.peak_source = peak_flops(self.device, self.dtype)

    def measure(self, compared: Iterable[Side], chain: bool = False) -> Iterator[dict]:
        return measure(compared, self.device.type, self.config.rounds, chain)

    def step(self, name: str, processes: int = 1, **changes: Any) -> Side:
        """The step as training takes it here, with changes of the options of `training`."""
        options: dict = dict(
            B=self.config.batch_size,
            T=self.config.sequence_length,
            size=self.size,
            dtype=self.dtype,
            tf32=self.on_gpu,
            flash=True,
            pad_vocab_to=128,
            own_loss=True,
            fused=self.on_cpu or self.on_gpu,
            compile=self.compile,
            recompute=self.on_cpu and self.compile,
            keep_memory=self.on_cpu,
        )
        options |= changes
        with torch.device("meta"):
            flops = GPT(GPTConfig(**options["size"])).flops_per_token(options["T"])
        return Side(
            name,
            peers.training,
            options,
            amount=processes * options["B"] * options["T"],
            peak=self.peak * (processes if self.on_gpu else 1) / flops,
            processes=processes,
        )


# -- the comparisons: each yields the rows of its table

TECHNIQUES = {  # of the ladder: the option of `training` that each changes, and from what
    "+ TF32 matmuls": ("tf32", False),
    "+ autocast to 16 bits": ("dtype", torch.float32),
    "+ fused attention": ("flash", False),
    "+ vocabulary of 50304": ("pad_vocab_to", 1),
    "+ the model's own loss": ("own_loss", False),
    "+ fused AdamW": ("fused", False),
    "+ torch.compile": ("compile", False),
    "+ cheap activations recomputed": ("recompute", False),
    "+ freed memory kept": ("keep_memory", False),
}


def climb_ladder(m: Machine) -> Iterator[dict]:
    """Each technique on top of those before it, from a plain step to what training does here.

    A technique that training does not use on this machine is left out.
    """
    used = m.step("").options
    options: dict = dict(TECHNIQUES.values())
    rungs = [m.step("float32, eager", **options)]
    for name, (option, plain) in TECHNIQUES.items():
        if used[option] != plain:
            options[option] = used[option]
            rungs.append(m.step(name, **options))
    more = m.config.batch_size * (2 if m.on_cpu else 4)
    rungs.append(m.step(f"+ micro-batch of {more}", B=more))
    return m.measure(rungs, chain=True)


def compare_peer(m: Machine) -> Iterator[dict]:
    """The peer's model, compiled, with our AdamW and precision, and the step of training."""
    name, theirs = "transformers", "hf"
    if m.config.against == "nanogpt":
        name, theirs = "nanoGPT", str(peers.find_nanogpt(m.config.peer))
    options: dict = dict(theirs=theirs, keep_memory=False)
    compared = [m.step("this repository"), m.step(f"{name}, eager", **options, compile=False)]
    if m.compile:
        compared.insert(0, m.step(f"{name}, compiled", **options))
    return m.measure(compared)


def sweep_batch_sizes(m: Machine) -> Iterator[dict]:
    """Micro-batches of …, 4, 2, 1: the large ones first, because they matter if time runs out."""
    for i in reversed(range(m.config.max_batch.bit_length())):
        yield from m.measure([m.step(f"B {2**i}", B=2**i)])


def scale_processes(m: Machine) -> Iterator[dict]:
    """The same micro-batch on each of 1, 2, 4, 8 processes, gradients averaged as in training."""
    most = torch.cuda.device_count() if m.on_gpu else os.cpu_count() or 1
    several = [m.step(f"{n} processes", n) for n in (2, 4, 8) if n <= most]
    return m.measure([m.step("1 process"), *several])


def compare_generation(m: Machine) -> Iterator[dict]:
    """Generation for 1 and 4 prompts."""
    ways = {"transformers": (True, False), "ours, eager": (False, False)}  # hf, compile
    if m.compile:
        ways["ours, compiled"] = (False, True)
    for rows in (1, 4):
        compared = []
        for name, (hf, compile) in ways.items():
            options = dict(rows=rows, size=m.size, dtype=m.dtype, hf=hf, compile=compile)
            compared.append(Side(f"{name}, {rows} × 128", peers.generation, options, rows * 128))
        yield from m.measure(compared)


def compare_scoring(m: Machine) -> Iterator[dict]:
    """HellaSwag as build-nanogpt scores it, and as training does."""
    examples = list(iterate_examples(m.config.hellaswag_path))
    examples = random.Random(0).sample(examples, min(m.config.examples, len(examples)))
    compared = []
    for name, batched in {"one example at a time": False, "in batches": True}.items():
        options = dict(examples=examples, size=m.size, dtype=m.dtype, batched=batched)
        options["compile"] = batched and m.compile
        compared.append(Side(name, peers.scoring, options, len(examples), "examples/s"))
    return m.measure(compared)


BENCHMARKS = {  # flag: what it runs, and its title
    "ladder": (climb_ladder, "A step of {B} × {T:,} tokens, each technique added to the last"),
    "against": (compare_peer, "A step of {B} × {T:,} tokens, beside {peer}"),
    "sweep": (sweep_batch_sizes, "A step of B × {T:,} tokens"),
    "scaling": (scale_processes, "A step of {B} × {T:,} tokens on each of several processes"),
    "generate": (compare_generation, "Generation of 128 tokens"),
    "hellaswag": (compare_scoring, "Scoring HellaSwag"),
}

TABLES = ("sweep", "scaling")  # they have no picture


def run_benchmarks(config: BenchConfig, args: list[str]) -> dict:
    """Runs the comparisons that are asked for. OUT.json and OUT.png always hold all rows so far."""
    m = Machine(config)
    command = shlex.join(["python", "bench.py", *args])
    result = describe_run(m.config, World(config.device), m.dtype, m.config.batch_size, command)
    result |= dict(why=m.why, peak=(m.peak, m.peak_source), benchmarks={})
    asked = [name for name in BENCHMARKS if getattr(config, name, False)]
    for name in asked or ["ladder"]:
        rows: list[dict] = []
        result["benchmarks"][name] = dict(rows=rows)
        compare, _ = BENCHMARKS[name]
        for row in compare(m):
            rows.append(row)
            record = json.dumps(result, indent=1)
            write_whole(Path(f"{config.out}.json"), record.encode())
            if figure := plot_benchmarks(result):
                save_picture(figure, Path(f"{config.out}.png"))
    return result


# -- the report

COLUMNS = {  # of a table, where a row has them: heading and format
    "name": ("", ""),
    "median": ("", ",.1f"),
    "ms": ("ms", ",.1f"),
    "beside": ("base beside it", ",.1f"),
    "ratio": ("× base", ""),
    "MFU": ("MFU", ".1%"),
    "memory_gb": ("peak GB", ".2f"),
    "start_s": ("start s", ".1f"),
    "loss": ("first loss", ".4f"),
    "right": ("right", ".0f"),
    "error": ("failed", ""),
}
HEAD = """
{config[model]} on {device[name]}, {device[threads]} threads, revision {git}
training uses {dtype} here ({why})
peak: {tflops:,.2f} TFLOP/s, {peak[1]}
MFU: the fraction of this peak that is reached
× base: how many times as fast as the base, as median and range of turns side by side
start: seconds from starting a process to the end of its first run, compilation included
first loss: equal only for models of one kind and micro-batch, which draw the same weights"""


def title_of(benchmark: str, result: dict) -> str:
    _, title = BENCHMARKS[benchmark]
    config = result["config"]
    peer = dict(hf="transformers", nanogpt="nanoGPT").get(config["against"])
    return title.format(B=config["batch_size"], T=config["sequence_length"], peer=peer)


def verdict(row: dict) -> str:
    """What the range of a row's ratios shows. One turn alone has none."""
    low = row["speedup_low"]
    high = row["speedup_high"]
    if low == high:
        return "no range"
    if low <= 1 <= high:
        return "no difference shown"
    return "faster" if low > 1 else "slower"


def show_bound(bound: float) -> str:
    """Two decimals, or more if they would hide on which side of 1 the bound is."""
    digits = 2
    while round(bound, digits) == 1 != bound:
        digits += 1
    return f"{bound:.{digits}f}"


def describe_ratio(row: dict) -> str:
    """How many times as fast as its base a row is, with the range, and what that shows."""
    if "speedup" not in row:
        return ""
    if verdict(row) == "no range":
        return f"{row['speedup']:.2f} × (no range)"
    bounds = f"{show_bound(row['speedup_low'])} to {show_bound(row['speedup_high'])}"
    return f"{row['speedup']:.2f} × ({bounds}): {verdict(row)}"


def format_table(rows: list[dict], columns: dict[str, tuple] = COLUMNS) -> str:
    """The rows as an aligned Markdown table with the columns that they have."""
    shown = []
    for key, (heading, spec) in columns.items():
        heading = rows[0]["unit"] if key == "median" else heading
        values = [describe_ratio(row) if key == "ratio" else row.get(key) for row in rows]
        cells = ["" if value is None else format(value, spec) for value in values]
        if any(cells):
            width = max(len(cell) for cell in [heading, *cells])
            align = ">" if spec else "<"
            column = [heading, "-" * width, *cells]
            shown.append([f"{cell:{align}{width}}" for cell in column])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*shown, strict=True))


def plot_benchmarks(result: dict) -> Any:
    """Draws a panel for each comparison that is not a table only; None if there is none."""
    panels = {k: each["rows"] for k, each in result["benchmarks"].items() if k not in TABLES}
    if not panels:
        return None
    figure, axes = new_figure(len(panels), 1, 1.2 + 0.28 * max(map(len, panels.values())))
    for axis, (name, rows) in zip(axes, panels.items(), strict=True):
        draw_ratios(axis, [row for row in rows if "error" not in row])
        about = f"{title_of(name, result)}: {result['config']['model']}"
        axis.set_xlabel(f"{about} on {result['device']['name']}")
    return figure


def draw_ratios(axis: Any, rows: list[dict]) -> None:
    """A row's ratio to its base with its range, pale if it shows no difference. Then its speed."""
    for place, row in enumerate(rows):
        ratio = "base"
        if "speedup" in row:
            color = BLUE if verdict(row) in ("faster", "slower") else PALE
            axis.plot([row["speedup_low"], row["speedup_high"]], [place] * 2, color=color)
            axis.plot(row["speedup"], place, "o", color=color, markersize=5)
            ratio = f"{row['speedup']:.2f} ×"
        text = f"{ratio:>6}{row['median']:>9,.1f} {row['unit']}"
        style = dict(textcoords="offset points", va="center", family="monospace", fontsize=8)
        axis.annotate(text, (1, place), (6, 0), axis.get_yaxis_transform(), **style)
    axis.set_title(describe_fastest(rows))
    axis.axvline(1, color=BLACK, linewidth=0.8)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axis.margins(x=0.05)
    axis.xaxis.set_major_formatter("{x:g} ×")


def describe_fastest(rows: list[dict]) -> str:
    """The row that gains most on its base."""
    faster = [row for row in rows if "speedup" in row and verdict(row) == "faster"]
    if not faster:
        return "No row is shown to be faster than its base"
    best = max(faster, key=lambda row: row["speedup"])
    bases = [row["name"] for row in rows[: rows.index(best)] if "speedup" not in row]
    base = "without it" if best["name"].startswith("+") else bases[-1]
    return f"{best['name'][0].upper()}{best['name'][1:]}: {best['speedup']:.2f} × as fast as {base}"


def main(args: list[str]) -> None:
    config = parse_flags(BenchConfig, args)
    result = run_benchmarks(config, args)
    print(HEAD.format(**result, tflops=result["peak"][0] / 1e12))
    for name, benchmark in result["benchmarks"].items():
        print(f"\n{title_of(name, result)}\n{format_table(benchmark['rows'])}")
    print(f"\nrecord: {config.out}.json")


if __name__ == "__main__":
    run_script(main)
