"""What README.md, docs/output.md and benchmarks/README.md quote is what the records say."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT

from bench import TABLES, format_table
from support.common import duration
from support.log import read_metrics
from support.report import of_type

README = (ROOT / "README.md").read_text()
OUTPUT = (ROOT / "docs" / "output.md").read_text()
PAGE = (ROOT / "benchmarks" / "README.md").read_text()
BENCHMARKS = sorted(path.name for path in (ROOT / "benchmarks").glob("cpu-*.json"))


def read_json(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / name).read_text())


@pytest.mark.parametrize(
    "page, run",
    [("README.md", "quickstart"), ("README.md", "laptop"), ("docs/output.md", "quickstart")],
)
def test_the_readme_and_the_page_about_output_quote_the_runs(page, run):
    text = (ROOT / page).read_text()
    records = read_metrics(ROOT / "runs" / run / "metrics.jsonl")
    val = of_type(records, "val")[-1]
    end = of_type(records, "end")[-1]
    memory = f"peak memory {end['memory'] / 1e9:.2f} GB"
    quotes = [
        f"step {val['step']:5d} | val loss {val['val_loss']:.4f} | perplexity "
        f"{val['perplexity']:.2f} | bits/byte {val['bits_per_byte']:.4f}",
        f"done: {end['step']} steps in {duration(end['wall'])}, {memory}",
    ]
    assert not [quote for quote in quotes if quote not in text]


def test_the_readme_quotes_samples_of_the_laptop():
    quoted = re.findall(r"\(([\d,]+) updates\):\n\n```\n(.*?)\n```", README, re.DOTALL)
    records = read_metrics(ROOT / "runs" / "laptop" / "metrics.jsonl")
    samples = {record["step"]: record["samples"] for record in of_type(records, "samples")}
    assert len(quoted) == 3
    for step, text in quoted:
        found = samples[int(step.replace(",", ""))]
        assert any(f"{sample}\n".startswith(f"{text}\n") for sample in found)


def test_the_page_about_output_quotes_a_line_of_the_quickstart():
    line = r"step +(\d+) \| loss (\S+) \| lr (\S+) \| norm (\S+) \| dt (\S+)ms \| tok/sec (\S+)"
    step, *quoted = re.search(line, OUTPUT).groups()
    records = read_metrics(ROOT / "runs" / "quickstart" / "metrics.jsonl")
    [x] = [record for record in of_type(records, "train") if record["step"] == int(step)]
    exact = [f"{x['loss']:.6f}", f"{x['lr']:.4e}", f"{x['norm']:.4f}", f"{x['ms']:.1f}"]
    assert quoted == [*exact, f"{x['tokens_per_sec']:,.0f}"]


def test_the_readme_quotes_comparisons_kills_speeds_and_sizes():
    arms = read_json("compare/compare.json")["arms"]
    kills = sum(read_json("torture.json")["kills"].values())
    scripts = [ROOT / name for name in ("model.py", "config.py", "evaluate.py", "train_gpt2.py")]
    theirs, _, ours = read_json("cpu-against.json")["benchmarks"]["against"]["rows"]
    everything = [
        p for pattern in ("*.py", "support/*.py", "benchmarks/*.py") for p in ROOT.glob(pattern)
    ]
    quotes = [
        f'"{arms[1]["against"]["verdict"]}"',
        f"{kills} random kills",
        f"trains {ours['speedup']:.2f} times as fast",
        f"({ours['speedup_low']:.2f} to {ours['speedup_high']:.2f})",
        f"in {ours['memory_gb']:.2f} GB instead of {theirs['memory_gb']:.2f} ",
        f"four files of {count_lines(scripts):,} lines",
        f"benchmarks included, is {count_lines(everything):,}.",
    ]
    text = " ".join(README.split())
    assert not [quote for quote in quotes if quote not in text]


def count_lines(paths: list[Path]) -> int:
    """Rounded to hundreds."""
    return round(sum(len(path.read_text().splitlines()) for path in paths), -2)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_page_of_benchmarks_shows_each_record(name):
    record = read_json(name)
    [found] = record["benchmarks"].values()
    quotes = [
        f"revision {record['git']}:",
        f"`{record['command']}`, {record['peak'][0] / 1e12:.2f} TFLOP/s.",
        format_table(found["rows"]),
    ]
    assert not [quote for quote in quotes if quote not in PAGE]
    picture = f"{name.removesuffix('.json')}.png"
    is_table = set(TABLES) & set(record["benchmarks"])
    assert (f"]({picture})" in PAGE) == (not is_table) == (ROOT / "benchmarks" / picture).exists()


def test_the_page_of_benchmarks_is_of_one_revision_and_short():
    assert BENCHMARKS
    assert len({read_json(name)["git"] for name in BENCHMARKS}) == 1
    assert len(PAGE.splitlines()) <= 120
