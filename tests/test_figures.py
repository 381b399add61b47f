"""What README.md and the pages quote is what the records say, and their links lead somewhere."""

import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from conftest import ROOT, code_files, run_program

from benchmarks import race
from benchmarks.tables import CLIMB, COLUMNS, format_table
from support.base.console import duration
from support.run.log import read_metrics
from support.show.report import of_type

# what one edits to try an idea
EDITED = ("model", "optim", "config", "evaluate", "minutes", "train_gpt2")
LIST_FILES = """
import sys, train_gpt2
for module in list(sys.modules.values()):
    print(getattr(module, "__file__", None) or "")
"""

README = (ROOT / "README.md").read_text()
OUTPUT = (ROOT / "docs" / "output.md").read_text()
RESUMING = (ROOT / "docs" / "resuming.md").read_text()
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
PAGE = (ROOT / "benchmarks" / "README.md").read_text()
LOG = (ROOT / "benchmarks" / "LOG.md").read_text()
LINKING = ["README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
LINKING += ["benchmarks/LOG.md", "records/README.md", "tests/paper/README.md", *DOCS]
BENCHMARKS = sorted(path.name for path in (ROOT / "benchmarks").glob("cpu-*.json"))
IN_THE_LOG = ("cpu-generate.json", "cpu-hellaswag.json", "cpu-ladder.json", "cpu-pieces.json")
BENCHMARKS += ["h200-ladder.json", "h200-nanogpt.json"]  # of a GPU, on a page of its own


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


def test_the_readme_shows_what_the_quickstart_wrote_as_it_learned():
    records = read_metrics(ROOT / "runs" / "quickstart" / "metrics.jsonl")
    head, cells = re.search(r"^\| (untrained .*)\n\|[-|]+\n(.*)$", README, re.MULTILINE).groups()
    written = {r["step"]: r["samples"][0] for r in of_type(records, "samples")}
    wall = {r["step"]: r["wall"] for r in of_type(records, "train")}
    assert [f"after {wall[step - 1]:.0f} seconds" for step in (160, 960)] == (
        re.findall(r"after \d+ seconds", head)
    )
    for step, cell in zip((0, 160, 960), cells.strip("|").split("|"), strict=True):
        sample = written[step].removeprefix("ROMEO:").strip()
        assert sample.startswith(cell.strip().replace("<br>", "\n")), step


def test_the_page_about_output_quotes_a_line_of_the_quickstart():
    line = r"step +(\d+) \| loss (\S+) \| lr (\S+) \| norm (\S+) \| dt (\S+)ms \| tok/sec (\S+)"
    step, *quoted = re.search(line, OUTPUT).groups()
    records = read_metrics(ROOT / "runs" / "quickstart" / "metrics.jsonl")
    [x] = [record for record in of_type(records, "train") if record["step"] == int(step)]
    exact = [f"{x['loss']:.6f}", f"{x['lr']:.4e}", f"{x['norm']:.4f}", f"{x['ms']:.1f}"]
    assert quoted == [*exact, f"{x['tokens_per_sec']:,.0f}"]


def test_the_readme_quotes_the_comparison_and_sizes():
    arms = read_json("compare/compare.json")["arms"]
    val = of_type(read_metrics(ROOT / "runs" / "quickstart" / "metrics.jsonl"), "val")[-1]
    edited = [ROOT / f"{name}.py" for name in EDITED]
    assert {*edited} <= {*loaded()}
    against = arms[1]["against"]
    low, high = min(against["tokens"]), max(against["tokens"])
    quotes = [
        f"ends {-against['mean']:.2f} ± {against['half']:.2f} nats per token lower",
        f"after {low:.0%} to {high:.0%} of the tokens",
        f"= {val['nats_per_character']:.3f} nats per character",
        f"six files, {count_lines(edited):,} of the {count_lines(loaded()):,} lines that training "
        "loads.",
        f"{speedup('nanogpt'):.2f} times as fast as nanoGPT's",
        f"{speedup('against'):.2f} times as fast as that of `transformers`",
        f"| {count_lines(code_files()):,}; you edit {count_lines(edited):,} of them "
        f"(tests: {count_lines(ROOT.glob('tests/*.py')):,}) |",
    ]
    text = " ".join(README.split())
    assert not [quote for quote in quotes if quote not in text]


def test_the_page_of_benchmarks_has_the_tables_of_the_races_that_the_readme_shows():
    shakespeare = race.summarize(read_json("minutes.json"))
    nats = {row["name"]: f"{math.log(2) * row['bits']:.2f}" for row in shakespeare}
    names = (race.THIS_REPOSITORY, race.ADAMW, race.HF, race.NANOGPT, race.MACBOOK_SIDE)
    cells = " | ".join(nats[name] for name in names)
    quotes = (f"| {cells} |", f"settings for a CPU reach {nats[race.MACBOOK_SIDE]}")
    assert not [quote for quote in quotes if quote not in " ".join(README.split())]
    assert format_table(shakespeare, race.COLUMNS) in PAGE
    library = race.summarize(read_json("amx-budget-10.json"))
    assert [row["name"] for row in library] == [row["name"] for row in shakespeare], "as it says"
    races = ("", "nanoGPT, our tokens", (1, 3)), ("amx-", race.HF, (1, 3, 10))
    for machine, peer, budgets in races:
        records = [read_json(f"{machine}budget-{n}.json") for n in budgets]
        tables = [race.summarize(record) for record in records]
        assert all(format_table(table, race.COLUMNS) in LOG for table in tables)
        for name in (race.THIS_REPOSITORY, race.ADAMW, peer):
            *bits, last = [row["bits"] for table in tables for row in table if row["name"] == name]
            quote = ", ".join(f"{one:.3f}" for one in bits) + f" and {last:.3f}"
            assert quote in " ".join(PAGE.split())


def test_the_page_about_resuming_quotes_kills_of_each_kind():
    record = read_json("torture.json")
    counts = re.findall(r"^\|.*\| ([\d; ]+) \|$", RESUMING, re.MULTILINE)
    shown = [int(count) for row in counts for count in row.split(";")]
    assert sorted(shown) == sorted(record["kills"].values())
    assert f"At revision {record['revision']}" in RESUMING
    assert f"{sum(shown)} random kills" in RESUMING


def speedup(name: str) -> float:
    """Of this repository's step, over the other one's compiled step."""
    _, ours, _ = read_json(f"cpu-{name}.json")["benchmarks"]["against"]["rows"]
    return ours["speedup"]


def loaded() -> list[Path]:
    """The files of this repository that training imports."""
    files = map(Path, run_program([sys.executable, "-c", LIST_FILES]).stdout.splitlines())
    return [file for file in files if file in code_files()]


def count_lines(paths: Iterable[Path]) -> int:
    """Rounded to hundreds."""
    return round(sum(len(path.read_text().splitlines()) for path in paths), -2)


@pytest.mark.parametrize("page", LINKING)
def test_every_link_of_a_page_leads_somewhere(page):
    text = (ROOT / page).read_text()
    links = re.findall(
        r"\]\(([^)]+)\)|^\[\w+\]: (\S+)|(?:src|srcset)=\"([^\"]+)\"", text, re.MULTILINE
    )
    for link in map("".join, links):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not link.startswith("http"):
            assert target.exists(), link
            headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in map(anchor_of, headings), link


def anchor_of(heading: str) -> str:
    """GitHub's: small letters, digits, hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_pages_are_short():
    assert len(README.splitlines()) <= 180 and len(README.split()) <= 1500
    for page in DOCS:
        assert len((ROOT / page).read_text().splitlines()) <= 120, page


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_page_shows_each_record_of_bench(name):
    page, record = LOG if name in IN_THE_LOG else PAGE, read_json(name)
    quotes = [f"{record['peak'][0] / 1e12:.2f} TFLOP/s, revision {record['git']}"]
    if record["device"]["type"] == "cuda":
        page = (ROOT / "docs" / "gpu.md").read_text()
    else:
        quotes = [f"`{record['command']}`, {quotes[0]}"]
    for benchmark, found in record["benchmarks"].items():
        quotes.append(format_table(found["rows"], CLIMB if benchmark == "ladder" else COLUMNS))
    assert not [quote for quote in quotes if quote not in page]


def test_the_page_of_benchmarks_is_short():
    assert BENCHMARKS and len(PAGE.splitlines()) <= 110
