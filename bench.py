"""The scoreboard: how fast is a training step here, which technique makes it so, and how far is it from the hardware's limit?

python bench.py                              the ladder: each technique added in turn, from plain float32 to what training uses
python bench.py --against hf --attention     any of the other comparisons, see --help
python bench.py --report A.json B.json       the results of several machines in one table and one plot

What is compared takes turns (benchmarks/turns.py); figures are medians of turns.
"""

import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

import plots
from benchmarks.hot_paths import generate, prepare, score
from benchmarks.recipes import SCALES, sweep_recipes
from benchmarks.turns import Side, measure
from distributed import World, pick_device
from model import GPT, SIZES, DataLoaderLite, GPTConfig, compiled, decay_groups, newest_flash_attention, peak_flops, pick_dtype
from tokenizer import EOT, UserError, read_flags, run_script
from train_gpt2 import compiler_works, describe_run, free_memory, train_step

MODELS = SIZES | {"tiny": dict(n_layer=2, n_head=2, n_embd=64)}


@dataclass
class Comparison:
    """What to measure."""

    ladder: bool = False  # each technique added in turn; also what runs when nothing else is asked for
    sweep: Literal["", "batch"] = ""  # batch: micro-batches of 1, 2, 4, … until memory ends
    scaling: bool = False  # 1, 2, 4, 8 processes, as many as there are GPUs (or cores)
    against: Literal["", "hf"] = ""  # hf: transformers' GPT-2, eager and compiled, with the same AdamW
    optimizers: bool = False  # what Muon costs beside AdamW
    attention: bool = False  # attention alone, fused and written out, by sequence length
    generate: bool = False  # 128 new tokens with a KV cache, without, and by transformers; limit: the memory's bandwidth
    hellaswag: bool = False  # HellaSwag in batches and one example at a time; limit: the matmul peak
    data: bool = False  # text to shards, by build-nanogpt's loop too; limit: the bare tokenizer
    recipes: bool = False  # AdamW and Muon on small models, learning rates swept: validation loss by tokens and time
    report: tuple[str, ...] = ()  # measure nothing: merge these JSON files into one table and one plot


@dataclass
class Size:
    """How much of it."""

    model: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "tiny"] = "gpt2"  # its size; tiny is for tests
    batch_size: int = 0  # micro-batch B; 0 = 4 on a CPU, 16 on a GPU
    sequence_length: int = 0  # T; 0 = 256 on a CPU, 1024 on a GPU
    max_batch: int = 128  # where --sweep batch ends at the latest
    rounds: int = 3  # turns of each side
    turn: float = 0.5  # seconds that a turn takes at least: short runs are repeated
    hellaswag_path: str = ""  # a jsonl file for --hellaswag; empty = download it
    examples: int = 48  # of HellaSwag, drawn at random: the first ones of the file are short
    megabytes: int = 50  # of text for --data
    data_dir: str = "data/stdlib-pieces"  # shards for --recipes; a run that is complete beside OUT is not trained again
    scales: tuple[str, ...] = tuple(SCALES)  # of --recipes: parameters outside the embedding
    learning_rates: tuple[float, ...] = (4e-3, 8e-3)  # of --recipes; more until the best is not at an end
    seeds: tuple[int, ...] = (0, 1, 2)  # of --recipes: the first for all, the others for the best learning rate
    recipe_steps: int = 100  # of 2,048 tokens


@dataclass
class Computation:
    """How it computes, and where the results go."""

    device: str = "auto"  # auto | cuda | mps | cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto = what training would pick here
    compile: bool = True  # torch.compile, where there is a compiler
    out: str = "log/bench"  # results go to OUT.json and OUT.png


@dataclass
class BenchConfig(Computation, Size, Comparison):  # a dataclass has the fields of the last first
    """Measure the training step and the other hot paths. Without a flag: the ladder, in a size that suits the machine."""


# -- what a side does, in a process of its own -------------------------------------------------------------------------


class MadeUpTokens(DataLoaderLite):
    """The real loader, on a shard of random tokens in documents of 1,000; counts the seconds that a step waits for it."""

    def __init__(self, B: int, T: int, world: World):
        self.folder, self.waited = tempfile.TemporaryDirectory(), 0.0
        tokens = np.random.default_rng(0).integers(EOT, size=2_000_000, dtype=np.uint16)
        tokens[::1000] = EOT
        np.save(Path(self.folder.name) / "made-up_train_000001.npy", tokens)
        super().__init__(self.folder.name, "train", B, T, world.rank, world.size, shuffle=True)

    def next_batch(self):
        start = time.perf_counter()
        batch = super().next_batch()
        self.waited += time.perf_counter() - start
        return batch


def build(hf: bool, own_loss: bool, T: int, pad_vocab_to: int, size: dict[str, int]) -> torch.nn.Module:
    """Our GPT; or with the loss that everyone writes first, over float32 logits of all tokens; or transformers' GPT-2."""
    if hf:
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(n_positions=T, **size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        theirs = model.forward
        model.forward = lambda x, y: (None, theirs(input_ids=x, labels=x, use_cache=False).loss)  # it shifts the labels itself
        return model
    model = GPT(GPTConfig(block_size=T, pad_vocab_to=pad_vocab_to, **size))
    if not own_loss:
        logits = lambda x: model.logits(model.hidden(x)).float()  # noqa: E731
        model.forward = lambda x, y: (None, F.cross_entropy(logits(x).flatten(0, 1), y.flatten()))
    return model


def training(
    world, B, T, size, dtype, tf32, compile, flash, pad_vocab_to, fused, own_loss, recompute, hf=False, optimizer="adamw"
) -> Callable:
    """The real train_step on made-up tokens -> its loss, and the seconds that it waited for the loader."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # AOTAutograd's cache does not know which attention a graph was traced with: it would hand the plain rung the fused kernel.
    functorch_config.enable_autograd_cache = flash
    if flash:
        newest_flash_attention(world.device)
    raw = build(hf, own_loss, T, pad_vocab_to, size).to(world.device)
    model = world.wrap(compiled(raw, recompute) if compile else raw)
    if optimizer == "muon":
        optimizers = raw.configure_optimizers(muon=True)
    else:
        groups = decay_groups(list(raw.parameters()), weight_decay=0.1)  # as configure_optimizers, for any model
        optimizers = [torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=fused or None)]  # None: PyTorch's default
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == torch.float16)
    loader = MadeUpTokens(B, T, world)

    def run() -> dict:
        before = loader.waited
        with nullcontext() if flash else sdpa_kernel([SDPBackend.MATH]):
            loss, _ = train_step(model, optimizers, scaler, loader, 1, world, dtype, 6e-4, 1.0)
        return dict(loss=loss, waited=loader.waited - before)

    return run


def attention(world, fused, T, dtype, n_layer, n_head, n_embd) -> Callable:
    """Causal attention alone, forward and backward, 4 sequences: PyTorch's fused one, or written out as in the paper."""
    shape = (3, 4, n_head, T, n_embd // n_head)
    q, k, v = (x.requires_grad_() for x in torch.randn(shape, device=world.device, dtype=dtype).unbind())
    future = torch.ones(T, T, dtype=torch.bool, device=world.device).triu(1)

    def written_out() -> torch.Tensor:
        scores = (q @ k.transpose(-2, -1) * q.size(-1) ** -0.5).masked_fill(future, -torch.inf)
        return scores.float().softmax(-1).to(dtype) @ v

    def run() -> None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if fused else written_out()
        y.sum().backward()

    return run


# -- the machine -------------------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """What all comparisons share: the flags with their defaults filled in, and what is known of the hardware."""

    config: BenchConfig
    device: torch.device
    dtype: torch.dtype  # what training would use here
    why: str
    why_not_compile: str
    peaks: dict[str, tuple[float, str]]  # precision: operations a second, source
    notes: list[str] = field(default_factory=list)  # what a reader of the table has to know

    @property
    def size(self) -> dict[str, int]:
        return MODELS[self.config.model]

    def peak(self, dtype: torch.dtype, tf32: bool = False) -> float:
        return self.peaks["tf32" if tf32 and dtype == torch.float32 else str(dtype).removeprefix("torch.")][0]

    def measure(self, sides: Iterable[Side]) -> Iterator[dict]:
        return measure(list(sides), self.device, self.config.rounds, self.config.turn)

    def step(self, name: str, base: int = 0, processes: int = 1, **changes) -> Side:
        """The step as training takes it here, with changes; MFU of the peaks of its own precision and of bfloat16."""
        c = self.config
        options = dict(B=c.batch_size, T=c.sequence_length, size=self.size, dtype=self.dtype, tf32="tf32" in self.peaks)
        options |= dict(compile=not self.why_not_compile, flash=True, pad_vocab_to=128, own_loss=True)
        options |= dict(fused=self.device.type in ("cuda", "cpu"), recompute=self.device.type == "cpu") | changes
        with torch.device("meta"):
            flops = GPT(GPTConfig(**options["size"])).flops_per_token(options["T"])
        half = torch.float16 if "float16" in self.peaks else torch.bfloat16
        peaks = {"MFU": self.peak(options["dtype"], options["tf32"]), "MFU bf16": self.peak(half)}
        devices = processes if self.device.type == "cuda" else 1
        limits = {column: devices * peak / flops for column, peak in peaks.items()}
        amount = processes * options["B"] * options["T"]
        return Side(name, training, options, amount, base=base, limits=limits, processes=processes)


def look_around(config: BenchConfig) -> Machine:
    """Fills the flags in, and finds or measures the peaks of the device."""
    device = pick_device(config.device)
    B, T = (4, 256) if device.type == "cpu" else (16, 1024)
    config = replace(config, batch_size=config.batch_size or B, sequence_length=config.sequence_length or T)
    dtype, why = pick_dtype(device, config.dtype)
    why_not = compiler_works(device) if config.compile else "--no-compile"
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    torch.set_float32_matmul_precision("highest")
    peaks = {str(d).removeprefix("torch."): peak_flops(device, d) for d in (torch.float32, half)}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        torch.set_float32_matmul_precision("high")
        peaks["tf32"] = peak_flops(device, torch.float32)
    return Machine(config, device, dtype, why, why_not, peaks)


# -- the comparisons: each yields the rows of its table ----------------------------------------------------------------


def ladder(m: Machine) -> Iterator[dict]:
    """Each technique on top of those before it, from a plain float32 step to what training does here. bfloat16 on
    a CPU that is slower at it, and recomputed activations on a GPU, are measured, and the next ones do not build on them."""
    B, half = m.config.batch_size, m.dtype if m.dtype != torch.float32 else torch.bfloat16
    more = B * (2 if m.device.type == "cpu" else 4)
    techniques = {
        "+ TF32 matmuls": dict(tf32=True),
        f"+ {str(half).removeprefix('torch.')} autocast": dict(dtype=half),
        "+ torch.compile": dict(compile=True),
        "+ fused attention": dict(flash=True),
        "+ vocabulary of 50304": dict(pad_vocab_to=128),
        "+ fused AdamW": dict(fused=True),
        "+ the model's own loss": dict(own_loss=True),
        "+ cheap activations recomputed": dict(recompute=True),
        f"+ micro-batch {B} → {more}": dict(B=more),
    }
    plain = dict(dtype=torch.float32) | dict.fromkeys(("tf32", "compile", "flash", "fused", "own_loss", "recompute"), False)
    plain |= dict(pad_vocab_to=1)
    sides, at, training_does = [m.step("float32, eager", **plain)], 0, m.step("").options
    for name, change in techniques.items():
        kept = "B" in change or change.items() <= training_does.items()
        if not kept and not ("dtype" in change or ("recompute" in change and training_does["compile"])):
            m.notes.append(f"left out: {name}, which training does not use here")
            continue
        sides.append(m.step(name, at, **(sides[at].options | change)))
        if kept:
            at = len(sides) - 1
        else:
            why = f" ({m.why})" if "dtype" in change else ""
            m.notes.append(f"{name!r} is only measured: training leaves it{why}, and what follows builds on the row before it")
    yield from m.measure(sides)


def sweep(m: Machine) -> Iterator[dict]:
    """Micro-batches of 1, 2, 4, … until memory ends, or on a CPU, which kills instead of raising, before it could."""
    B, row, first = 1, dict(memory_gb=0), None
    room = free_memory(m.device) / 1e9
    while B <= m.config.max_batch and "error" not in row:
        if m.device.type == "cpu" and 2 * row["memory_gb"] > room:
            return m.notes.append(f"ended before B {B}: it could need {2 * row['memory_gb']:.0f} of the {room:.0f} GB free")
        [row] = m.measure([m.step(f"B {B}", B=B)])
        first = first or row.get("median")
        yield row | (dict(total=row["median"] / first) if "median" in row else {})
        B *= 2


def scaling(m: Machine) -> Iterator[dict]:
    """The same micro-batch on each of 1, 2, 4, 8 processes, gradients averaged as in training."""
    most = torch.cuda.device_count() if m.device.type == "cuda" else os.cpu_count() or 1
    if m.device.type != "cuda":
        m.notes.append("the processes share the same cores: the ideal is the speed of one process")
    yield from m.measure(m.step(f"{n} process(es)", processes=n) for n in (1, 2, 4, 8) if n <= most)


def against(m: Machine) -> Iterator[dict]:
    """transformers' GPT-2, the same AdamW and precision, and the step as training takes it."""
    eager, compiled = dict(hf=True, compile=False), dict(hf=True, recompute=False)
    sides = [m.step("transformers, eager", **eager), m.step("transformers, compiled", **compiled)]
    yield from m.measure([*sides[: 1 if m.why_not_compile else 2], m.step("this repository")])


def optimizers(m: Machine) -> Iterator[dict]:
    """AdamW and Muon after one micro-batch, and what Muon's own work is of a step of 0.5M tokens."""
    tokens = m.config.batch_size * m.config.sequence_length
    every = f"an update every {tokens:,} tokens"
    adamw, muon = rows = [*m.measure([m.step(f"{every}: AdamW"), m.step(f"{every}: Muon", optimizer="muon")])]
    yield from rows
    if "ms" in adamw and "ms" in muon:
        more = muon["ms"] - adamw["ms"]
        part = more / (adamw["ms"] * 524288 / tokens)
        m.notes.append(f"Muon takes {more:,.0f} ms more, once a step: {part:.1%} of a step of 524,288 tokens on this device")


def attend(m: Machine) -> Iterator[dict]:
    """Attention by sequence length: the classic speed-up is 7.6 on a T4."""
    m.notes.append(f"4 sequences, {m.size['n_head']} heads, {m.dtype}, forward and backward")
    for T in [T for T in (2**i for i in range(5, 20)) if T <= 4 * m.config.sequence_length][-5:]:
        ways = {"written out": False, "fused": True}
        options = dict(T=T, dtype=m.dtype, **m.size)
        rows = m.measure(Side(f"{way}, T {T}", attention, dict(fused=on, **options), 4 * T) for way, on in ways.items())
        yield from (row | dict(way=way, T=T) for row, way in zip(rows, ways, strict=True))


BENCHMARKS = dict(ladder=ladder, sweep=sweep, scaling=scaling, against=against, optimizers=optimizers)
BENCHMARKS |= dict(attention=attend, generate=generate, hellaswag=score, data=prepare, recipes=sweep_recipes)

# -- results: table, JSON, plot ----------------------------------------------------------------------------------------

COLUMNS = {  # of a table, where a row has them: heading and format
    **dict(machine=("machine", ""), name=("", ""), median=("", ",.1f"), ms=("ms", ",.1f")),
    **dict(beside=("base beside it", ",.1f"), speedup=("× base", ".2f"), total=("× first", ".2f")),
    **{column: (column, ".1%") for column in ("MFU", "MFU bf16", "of limit", "loader")},
    **dict(memory_gb=("peak GB", ".2f"), start_s=("start s", ".1f"), loss=("first loss", ".4f"), right=("right", ".0f")),
    **dict(val_loss=("validation loss", ".4f"), error=("failed", "")),
}


def table(rows: list[dict]) -> str:
    """The rows as an aligned Markdown table with the columns that they have."""
    columns = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    units = dict.fromkeys(row["unit"] for row in rows if "unit" in row)
    cells = [[COLUMNS[key][0] or ", ".join(units) * (key == "median") for key in columns]]
    cells += [["" if row.get(key) is None else format(row[key], COLUMNS[key][1]) for key in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = ["<" if COLUMNS[key][1] == "" else ">" for key in columns]
    lines = ["| " + " | ".join(f"{c:{s}{w}}" for c, s, w in zip(line, sides, widths, strict=True)) + " |" for line in cells]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if s == "<" else ":") for s, w in zip(sides, widths, strict=True)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def describe(result: dict) -> str:
    """The machine, the precision, the peaks that MFU is measured against, and what the columns mean."""
    d, c = result["device"], result["config"]
    lines = [
        f"{d['name']} ({d['type']}, {d['threads']} CPU threads), torch {result['versions']['torch']}, revision {result['git']}",
        f"{result['command']}; training uses {result['dtype']} here ({result['why']})",
        f"{c['model']}, B {c['batch_size']} × T {c['sequence_length']}, medians of {c['rounds']} turns",
        *(f"peak {name}: {flops / 1e12:,.2f} TFLOP/s, {source}" for name, (flops, source) in result["peaks"].items()),
        "MFU: of the peak of the row's own precision; MFU bf16: of bfloat16's (float16's where there is no bfloat16)",
        "× base: times as fast as the row it builds on, in turns side by side; × first: as the first row, a product of those",
        "loader: the part of a step that waits for data; start: from a new process to the end of its first run, compiled",
        "first loss: rows of one model and one micro-batch begin with the same weights and tokens",
    ]
    return "\n".join(lines)


def read_result(path: str | Path) -> dict:
    try:
        result = json.loads(Path(path).read_text())
        _ = result["device"]["name"], [found["rows"] for found in result["benchmarks"].values()]
        return result
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a result of bench.py ({type(error).__name__}: {error}): name its JSON files") from None


def report(results: list[dict], out: str) -> None:
    """The results of one or more machines: a table for each comparison, and one plot, OUT.png."""
    for result in results:
        print(f"\n{describe(result)}")
    for name in dict.fromkeys(name for result in results for name in result["benchmarks"]):
        rows, notes = [], []
        for result in [result for result in results if name in result["benchmarks"]]:
            machine, found = result["device"]["name"], result["benchmarks"][name]
            rows += [dict(machine=machine) | row if len(results) > 1 else row for row in found["rows"]]
            notes += [f"  {machine}: {note}" if len(results) > 1 else f"  {note}" for note in found["notes"]]
        print("\n".join([f"\n{name}", table(rows), *notes]))
    plots.plot_benchmarks(results).savefig(f"{out}.png")
    print(f"\nplot: {out}.png")


def check(config: BenchConfig) -> None:
    """Raises UserError that names every value that cannot be."""
    least = dict(rounds=1, max_batch=1, batch_size=0, sequence_length=0, examples=1, megabytes=1, recipe_steps=2)
    problems = [
        f"--{k.replace('_', '-')} {getattr(config, k)}: at least {n}" for k, n in least.items() if getattr(config, k) < n
    ]
    problems += [f"--scales {scale}: one of {', '.join(SCALES)}" for scale in config.scales if scale not in SCALES]
    if config.recipes and not Path(config.data_dir).is_dir():
        problems.append(
            f"--data-dir {config.data_dir} does not exist: make data/stdlib-pieces with python -m benchmarks.recipes"
        )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        problems.append("bench.py starts its own processes: use python bench.py --scaling, not torchrun")
    if problems:
        raise UserError("; ".join(problems))


def main() -> None:
    config = read_flags(BenchConfig)
    check(config)
    Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    if config.report:
        return report([read_result(path) for path in config.report], config.out)
    start, m = time.perf_counter(), look_around(config)
    with World(config.device) as world:
        result = describe_run(m.config, world, m.dtype, m.config.batch_size)
    result |= dict(command=f"python bench.py {shlex.join(sys.argv[1:])}".strip(), why=m.why, peaks=m.peaks, benchmarks={})
    for name in [name for name in BENCHMARKS if getattr(config, name)] or ["ladder"]:
        m.notes, rows = [], []
        for row in BENCHMARKS[name](m):  # written at once: an interruption loses one row at most
            rows.append(row)
            result["benchmarks"][name] = dict(rows=rows, notes=m.notes)
            Path(f"{config.out}.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    Path(f"{config.out}.json").write_text(json.dumps(result, indent=1, default=str) + "\n")  # with the last notes
    report([result], config.out)
    print(f"numbers: {config.out}.json; {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    run_script(main)
