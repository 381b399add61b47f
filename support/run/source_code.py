"""A copy of this repository that trains a run: its code, its hash, its changes to another copy."""

import difflib
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parents[2]
# no result depends on tests, pages and records of results; the last three are never in git
NO_CODE = {"tests", "docs", "benchmarks", "records", "runs", ".md", ".ipynb", "data", "log", "venv"}


def read_code(copy: Path) -> dict[str, bytes]:
    """{name: content} of the files that may change a result: those in git, and new Python files."""
    if names := list_files(copy, "--cached"):
        names += list_files(copy, "--others", "--exclude-standard", "*.py")
    else:  # a copy without git: what git tracks here, if it is there, and what is new
        new = [*copy.rglob("*.py"), *(copy / "assets").rglob("*")]
        names = list_files(HERE, "--cached") + [file.relative_to(copy) for file in new]
    files = [name for name in names if not {name.parts[0], name.suffix} & NO_CODE]
    files = [name for name in files if not name.parts[0].startswith(".")]
    files = sorted({name for name in files if (copy / name).is_file()})
    return {name.as_posix(): (copy / name).read_bytes() for name in files}


def list_files(clone: Path, *which: str) -> list[Path]:
    """What `git ls-files` lists of a clone; nothing where git is not."""
    if not (clone / ".git").exists() or not shutil.which("git"):
        return []
    command = ["git", "-C", str(clone), "ls-files", "-z", *which]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    return [Path(name) for name in listed.split("\0") if name]


def hash_code(copy: Path) -> str:
    """A hash of what `read_code` finds, and of the names: runs of other code are other runs."""
    sha256 = hashlib.sha256()
    for name, content in read_code(copy).items():
        sha256.update(f"{name} {len(content)}\n".encode() + content)
    return sha256.hexdigest()


def compare_code(base: dict[str, bytes], code: dict[str, bytes]) -> str:
    """The changes from the base's files to a copy's, as a patch for `patch -p1` or git."""
    patch: list[str] = []
    for name in sorted(base | code):
        texts = (files.get(name, b"").decode("utf-8", "replace") for files in (base, code))
        before, after = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in texts)
        left = f"a/{name}" if name in base else "/dev/null"
        right = f"b/{name}" if name in code else "/dev/null"
        patch += difflib.unified_diff(before, after, left, right)
    whole = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + whole for line in patch)
