"""The scoreboard: how fast is a training step here, and how far is that from the hardware's limit?

python bench.py                            the climb: techniques of "Let's reproduce GPT-2" in turn,
                                           then larger micro-batches and more processes
python bench.py --beside A.json B.json     draws records of other machines, and measures nothing
python bench.py --against hf --generate    other comparisons, see --help
"""

import json
import random
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from benchmarks import climb, peers
from benchmarks.measure import Side, measure
from benchmarks.tables import CLIMB, COLUMNS, format_table
from config import GPT2_SIZES
from hellaswag import iterate_examples
from model import GPT, GPTConfig
from support.base.console import run_script
from support.base.files import write_whole
from support.base.flags import Count, CountOrZero, Dtype, String, Strings, parse_flags
from support.base.process import usable_cores
from support.machine.compile import why_not_compile
from support.machine.device import free_memory, peak_flops, pick_device, pick_dtype
from support.machine.distributed import start_world
from support.show import plots, report


@dataclass(frozen=True)
class BenchConfig:
    """Measures a training step and more. Without flags, adds one technique after another to it."""

    # hf: compare with transformers' GPT-2, compiled and eager; nanogpt: with the clone in --peer
    against: Annotated[
        Literal["", "hf", "nanogpt"], tyro.conf.arg(metavar="{hf,nanogpt}", help_behavior_hint="")
    ] = ""
    peer: String = ""  # a clone of https://github.com/karpathy/nanoGPT
    pieces: bool = False  # measure attention by length, AdamW's implementations, precisions
    generate: bool = False  # generate 128 tokens, also with transformers
    hellaswag: bool = False  # score HellaSwag one example at a time, and in batches
    beside: Strings = ()  # records to draw beside the published ones; measures nothing

    model: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "tiny"] = "gpt2"  # which size
    batch_size: CountOrZero = 0  # micro-batch B; 0 = 16 on a GPU of 40 GB, 4 on others, else 1
    sequence_length: Count = 1024  # tokens of a sequence, T
    max_batch: CountOrZero = 0  # the largest micro-batch; 0 = 128 on a GPU, else 16
    rounds: Count = 3  # how often each side is measured; they take turns
    hellaswag_path: String = ""  # a .jsonl file of HellaSwag; empty = download it
    examples: Count = 48  # of HellaSwag, drawn at random

    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Dtype = "auto"  # auto = as in training
    compile: bool = True  # use torch.compile, where there is a compiler
    out: String = ""  # OUT.json, the climb OUT.png; default: log/bench, log/bench-generate, …


class Machine:
    """The flags, with their defaults filled in, and what this machine can do."""

    def __init__(self, config: BenchConfig):
        self.device = pick_device(config.device)
        self.on_cpu = self.device.type == "cpu"
        self.on_gpu = self.device.type == "cuda"
        # the first row needs 28 GB with 16 sequences
        is_large = self.on_gpu and free_memory(self.device) > 4e10
        B = config.batch_size or (16 if is_large else 4 if self.on_gpu else 1)
        most = config.max_batch or (128 if self.on_gpu else 16)
        self.config = replace(config, batch_size=B, max_batch=most)
        self.size = GPT2_SIZES.get(config.model, dict(n_layer=2, n_head=2, n_embd=64))  # or tiny
        self.dtype, self.why = pick_dtype(self.device, config.dtype)  # as in training
        self.compile = config.compile and not why_not_compile(self.device)
        self.records = self.on_gpu and self.compile and self.dtype != torch.float16  # CUDA graphs
        torch.set_float32_matmul_precision("high")  # as in training
        self.peak, self.peak_source = peak_flops(self.device, self.dtype)
        is_tf32 = self.on_gpu and self.dtype == torch.float32
        self.peaks = {(self.dtype, is_tf32): self.peak}

    def peak_of(self, dtype: torch.dtype, tf32: bool) -> float:
        """FLOP/s at an MFU of 1 in a row's own precision."""
        key = (dtype, tf32 and dtype == torch.float32)
        if key not in self.peaks:
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            self.peaks[key], _ = peak_flops(self.device, dtype, tf32=tf32)
        return self.peaks[key]

    def measure(self, compared: Iterable[Side], chain: bool = False) -> Iterator[dict]:
        return measure(compared, self.device.type, self.config.rounds, chain)

    def step(self, name: str, processes: int = 1, **changes: Any) -> Side:
        """The step as training takes it here, with changes of the options of `training`.

        A peer's model goes without what its own loop lacks.
        """
        ours = not changes.get("theirs")
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
            keep_memory=self.on_cpu and ours,
            graphs=ours and self.records and processes == 1,
        )
        options |= changes
        with torch.device("meta"):
            flops = GPT(GPTConfig(**options["size"])).flops_per_token(options["T"])
        amount = processes * options["B"] * options["T"]
        own = self.peak_of(options["dtype"], options["tf32"])
        peak = own * (processes if self.on_gpu else 1) / flops
        return Side(name, peers.training, options, amount, peak=peak, processes=processes)


# -- the comparisons: each yields the rows of its table

TECHNIQUES = {  # in the lecture's order, then ours: the option that each changes, and from what
    "+ TF32": ("tf32", False),
    "+ 16 bits": ("dtype", torch.float32),
    "+ torch.compile": ("compile", False),
    "+ fused attention": ("flash", False),
    "+ 50,304 rows": ("pad_vocab_to", 1),
    "+ fused AdamW": ("fused", False),
    "+ loss without all logits": ("own_loss", False),
    "+ cheap activations recomputed": ("recompute", False),
    "+ freed memory kept": ("keep_memory", False),
    "+ CUDA graphs": ("graphs", False),
}


def climb_ladder(m: Machine) -> Iterator[dict]:
    """Each technique on top of those before it, then larger micro-batches, then more processes."""
    rows: list[dict] = []
    for row in m.measure(find_rungs(m, rows), chain=True):
        rows.append(row)
        yield row


def find_rungs(m: Machine, rows: list[dict]) -> Iterator[Side]:
    """The ladder's sides. rows: those so far, which say whether a micro-batch fits and gains."""
    used = m.step("").options
    options: dict = dict(TECHNIQUES.values())
    yield m.step("float32, eager", **options)
    for name, (option, plain) in TECHNIQUES.items():
        if used[option] != plain:  # else training does not use it on this machine
            options[option] = used[option]
            unfelt = m.on_cpu and option == "pad_vocab_to"  # matrix units of GPUs want it
            yield m.step(f"{name} (for GPUs)" if unfelt else name, **options)
    B = m.config.batch_size
    while 2 * B <= m.config.max_batch:
        yield m.step(f"+ micro-batch of {2 * B}", B=2 * B)
        if "error" not in rows[-1]:
            B *= 2
        if rows[-1].get("speedup", 0) <= 1:
            break
    most = usable_cores() if m.on_cpu else torch.accelerator.device_count()
    for n in (2, 4, 8):  # one on each GPU; a CPU is shared
        if n <= most:
            yield m.step(f"{n} processes", n, B=B)


def compare_peer(m: Machine) -> Iterator[dict]:
    """The peer's model, compiled, with our AdamW and precision, and the step of training."""
    name, theirs = "transformers", "hf"
    if m.config.against == "nanogpt":
        name, theirs = "nanoGPT", str(peers.find_nanogpt(m.config.peer))
    compared = [m.step("this repository"), m.step(f"{name}, eager", theirs=theirs, compile=False)]
    if m.compile:
        compared.insert(0, m.step(f"{name}, compiled", theirs=theirs))
    return m.measure(compared)


def compare_attention(m: Machine) -> Iterator[dict]:
    for T in (256, 512, 1024, 2048, 4096):
        both: dict = dict(T=T, dtype=m.dtype)
        plain = Side(f"T = {T:,}, written out", peers.attention, dict(both, fused=False), T)
        fused = Side(f"T = {T:,}, fused", peers.attention, dict(both, fused=True), T)
        yield from m.measure([plain, fused])


def compare_adamw(m: Machine) -> Iterator[dict]:
    ways = {"a loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}
    return m.measure(
        Side(name, peers.adamw, dict(size=m.size, way=way), 1, "updates/s")
        for name, way in ways.items()
    )


def compare_precisions(m: Machine) -> Iterator[dict]:
    """The step in each precision that training may use here."""
    ways = {"float32": (False, torch.float32), "TF32": (True, torch.float32)}
    if m.dtype != torch.float32:
        ways |= {"16 bits": (False, m.dtype), "both": (True, m.dtype)}
    return m.measure(
        m.step(name, tf32=tf32, dtype=dtype)
        for name, (tf32, dtype) in ways.items()
        if m.on_gpu or not tf32
    )


def compare_generation(m: Machine) -> Iterator[dict]:
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


BENCHMARKS = {  # flag: what it runs, its title, and the columns of its table
    "ladder": (climb_ladder, "A training step, each technique added to the last", CLIMB),
    "against": (compare_peer, "A training step, beside another program's", COLUMNS),
    "attention": (compare_attention, "Attention, forward only, by 12 heads of 64", COLUMNS),
    "adamw": (compare_adamw, "AdamW's update", COLUMNS),
    "precision": (compare_precisions, "A training step, by precision", COLUMNS),
    "generate": (compare_generation, "Generation of 128 tokens", COLUMNS),
    "hellaswag": (compare_scoring, "Scoring HellaSwag", COLUMNS),
}


def run_benchmarks(config: BenchConfig, args: list[str]) -> dict:
    """Runs the comparisons that are asked for. OUT.json always holds all rows so far."""
    m = Machine(config)
    command = shlex.join(["python", "bench.py", *args])
    world = start_world(config.device)
    result = report.describe_run(asdict(m.config), world, m.dtype, m.config.batch_size, command)
    result |= dict(why=m.why, peak=(m.peak, m.peak_source), benchmarks={})
    flags = dict.fromkeys(("attention", "adamw", "precision"), "pieces")  # others: their names
    asked = [name for name in BENCHMARKS if getattr(config, flags.get(name, name), False)]
    for name in asked or ["ladder"]:
        rows: list[dict] = []
        result["benchmarks"][name] = dict(rows=rows)
        compare, *_ = BENCHMARKS[name]
        for row in compare(m):
            rows.append(row)
            write_whole(Path(f"{config.out}.json"), json.dumps(result, indent=1).encode())
    return result


HEAD = """
{config[model]} on {device[name]}, {device[threads]} threads, revision {git}
a step: {config[batch_size]} × {config[sequence_length]:,} tokens, unless a row says otherwise
training uses {dtype} here ({why})
peak: {tflops:,.2f} TFLOP/s, {peak[1]}
MFU: the fraction of the peak that is reached, of the precision of the row
×: how many times as fast as the base or the row that is named, by turns side by side: the
   median, and their range; three equal turns are on one side of 1 in a quarter of the rows
start: seconds from starting a process to the end of its first run, compilation included
first loss: equal only for models of one kind and micro-batch, which draw the same weights"""


def main(args: list[str]) -> None:
    config = parse_flags(BenchConfig, args)
    asked = [flag for flag in (*BENCHMARKS, "pieces") if getattr(config, flag, False)]
    config = replace(config, out=config.out or "-".join(["log/bench", *asked]))
    climbs = config.beside
    if not climbs:
        result = run_benchmarks(config, args)
        print(HEAD.format(**result, tflops=result["peak"][0] / 1e12))
        for name, benchmark in result["benchmarks"].items():
            _, title, columns = BENCHMARKS[name]
            print(f"\n{title}\n{format_table(benchmark['rows'], columns)}")
        print(f"\nrecord: {config.out}.json")
        climbs = (f"{config.out}.json",) if "ladder" in result["benchmarks"] else ()
    if climbs:
        plots.save_picture(climb.plot_climbs(climbs), Path(f"{config.out}.png"))
        print(f"climb: {config.out}.png")


if __name__ == "__main__":
    run_script(main)
