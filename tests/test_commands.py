"""Each command of README and the pages runs as it is typed, on what it names.

What needs the hub, a GPU or a second machine is left out, and what takes an hour is shortened: the
two tables say what. It takes half an hour, so `make torture` runs it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, environment, random_model

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
IN_PROSE = "python fineweb.py --source tales --vocab-size 4096"  # data of later commands
BEGINS = re.compile(r"!|((\S*/)?python|torchrun|make|git|sed|awk|srun|export|pip|lm_eval) ")
LEFT_OUT = {
    r"^git clone URL": "this page's address",
    r"^!|^pip install|^lm_eval": "Colab; the network (test_hellaswag.py runs lm_eval)",
    r"nproc_per_node=8|^srun|^export HOST": "eight GPUs",
    r"^python (fineweb|train_gpt2)\.py( --resume auto)?$|edu_fineweb10B|hub:": "FineWeb-Edu",
    r"gpt2-xl|--model gpt2|--init-from gpt2": "OpenAI's weights, from the hub",
}
SHORTENED = {
    "--minutes 20": "--minutes 1",
    "--preset laptop": "--preset laptop --max-steps 20 --checkpoint-every 10",
    "--batch-size 8 ": "--batch-size 8 --max-steps 20 ",
    "--log-dir log/cpu": "--log-dir log/cpu --max-steps 20",
    '"--preset quickstart"': '"--preset quickstart --max-steps 10 --warmup-steps 2"',
    "--sweep learning_rate=5e-4,1e-3,2e-3,4e-3,8e-3 --seeds 5": "--seeds 2",
    "--max-steps 1000 --warmup-steps 50": "--max-steps 2 --warmup-steps 1",
    "ckpt_001000": "ckpt_000002",
}


def read_commands(page: str) -> list[str]:
    """The commands in a page's blocks, their lines joined, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    commands = [re.sub(r"\s+#.*| {2,}", " ", line).strip() for line in lines]
    return [command for command in commands if BEGINS.match(command)]


def write_examples(place: Path) -> None:
    """The files that the pages call yours."""
    text = "".join((ROOT / page).read_text() for page in PAGES)
    for name in ("notes.txt", "other.txt", "books/a.txt", "books/b.txt"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(f"{name}\n{text}" * 5)
    (place / "more").mkdir()
    (place / "more" / "a.jsonl").write_text('{"text": "a line of JSON"}\n')
    pq.write_table(pa.table({"text": [text]}), place / "data.parquet")
    (place / "prompts.txt").write_text("ROMEO:\nJULIET:\n")
    model = random_model(block_size=32)
    names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
    fields = {name: getattr(model.config, name) for name in names}
    torch.save({"model_args": fields, "model": model.state_dict()}, place / "ckpt.pt")


def type_in(place: Path, command: str) -> subprocess.CompletedProcess:
    variables = environment(PATH=f"{sys.prefix}/bin:/usr/bin:/bin")
    del variables["OMP_NUM_THREADS"]  # as one types it
    return subprocess.run(
        ["bash", "-c", command],
        cwd=place,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.torture
def test_each_command_of_the_pages_runs_as_it_is_typed(tmp_path):
    place = tmp_path / "gpt2"
    subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True)
    (place / ".venv").symlink_to(Path(sys.prefix))
    write_examples(place)
    assert IN_PROSE in (ROOT / "README.md").read_text()
    assert type_in(place, IN_PROSE).returncode == 0
    unused = {*LEFT_OUT, *SHORTENED}
    typed: set[str] = set()  # two pages may begin alike
    for page in PAGES:
        for command in read_commands(page):
            if found := {pattern for pattern in LEFT_OUT if re.search(pattern, command)}:
                unused -= found
                continue
            for long, short in SHORTENED.items():
                unused -= {long} if long in command else set()
                command = command.replace(long, short)
            if command not in typed:
                done = type_in(place, command)
                assert done.returncode == 0, f"{page}: {command}\n{done.stdout}\n{done.stderr}"
            typed.add(command)
    assert not unused, "what no page has any more"
    shutil.rmtree(place)  # gigabytes
