"""`make paper`: what a GPU would run, checked on a machine without one.

It compiles each configuration in a process of its own, and prints the tables of
README.md beside it, which must be the same there. It ends with 0 if it is green, with 1 and a
sentence for each finding, or with 3 if it could not run.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = HERE / "README.md"
STORY = ROOT / "docs/techniques.md"
CONFIGURATIONS = {
    "124M": "--batch-size 64",
    "float16": "--batch-size 64 --dtype float16",
    "Muon": "--batch-size 64 --preset gpt2-muon",
    "checkpointing": "--batch-size 64 --activation-checkpointing",
    "XL": "--batch-size 8 --preset gpt2-xl",
    "deterministic": "--batch-size 64 --deterministic",
    "the loss' kernel": "--batch-size 64",
}
TECHNIQUES = {  # the last is the 124M's row above
    "16 bits, eager": "--batch-size 64 --no-compile plain-attention plain-loss",
    "+ torch.compile": "--batch-size 64 plain-attention plain-loss",
    "+ fused attention": "--batch-size 64 plain-loss",
}


def why_not_run() -> str:
    try:
        import torch
        import triton  # noqa: F401
    except Exception as error:
        return f"triton and PyTorch are needed ({type(error).__name__}: {error})"
    if torch.version.cuda:
        index = "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
        return f"PyTorch's CPU build is needed: remove .venv-paper, then {index} make paper"
    return "" if shutil.which("g++") else "g++ is needed"


def run(name: str, script: str, *args: str, folder: Path) -> tuple[Any, list[str]]:
    """A script's rows and findings. If it fails, its last line is the finding."""
    start = time.perf_counter()
    result = folder / f"{name}.json"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    if "kernel" in name:
        environment["GPT2_LOSS_KERNEL"] = "1"
    command = [sys.executable, HERE / script, *args, result]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        rows, problems = json.loads(result.read_text())
    else:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        rows, problems = {}, [(errors or [f"it ends with {done.returncode}"])[-1]]
    print(f"{name}: {len(problems)} findings, {time.perf_counter() - start:.0f} s", flush=True)
    return rows, [f"{name}: {problem}" for problem in problems]


def as_table(head: str, rows: dict[str, dict[str, str]]) -> str:
    columns = [head, *next(iter(rows.values()), {})]
    lines = [columns, ["---"] * len(columns)]
    lines += [[name, *row.values()] for name, row in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    if reason := why_not_run():
        print(f"not run: {reason}")
        return 3
    steps = {}
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        for gpu in ("H100", "A100"):
            for name, flags in CONFIGURATIONS.items():
                title = f"{gpu}, {name}"
                rows, problems = run(title, "mock_gpu.py", gpu, flags, folder=Path(folder))
                findings += problems
                titles = [title, f"{gpu}, HellaSwag's mask"] if name == "124M" else [title]
                steps |= dict(zip(titles, rows, strict=False))
        by_technique = {}
        for name, flags in TECHNIQUES.items():
            rows, problems = run(name, "mock_gpu.py", "H100", flags, folder=Path(folder))
            findings += problems
            by_technique[name], *_ = rows or [{}]  # the other row is HellaSwag's
        by_technique["+ loss without all logits"] = steps.get("H100, 124M", {})
        updates, problems = run("collectives", "collectives.py", folder=Path(folder))
        findings += problems
        findings += run("values of the loss", "loss.py", folder=Path(folder))[1]
    for name, row in by_technique.items():
        kept = ("launches", "GB moved", "TFLOP", "roofline", "peak")
        by_technique[name] = {key: row.get(key, "").partition(" of ")[0] for key in kept}
    tables = [(PAGE, as_table("a micro-step", steps)), (PAGE, as_table("an update", updates))]
    for page, table in [*tables, (STORY, as_table("a micro-step", by_technique))]:
        print(f"\n{table}")
        if table not in page.read_text():
            findings.append(f"{page.name} has another table: if this one is right, put it there")
    print("\n".join(f"RED: {finding}" for finding in findings) or "green")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
