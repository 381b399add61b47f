"""What this process runs as: its cores, its Python, its revision, commands as one types them."""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path


def find_in(path: str, pattern: str) -> str:
    """What the pattern's group matches in a file of the Linux kernel; empty if there is nothing."""
    file = Path(path)
    match = re.search(pattern, file.read_text()) if file.exists() else None
    return match[1] if match else ""


def usable_cores() -> int:
    """The cores that this process may use: a container or a cluster may not give it all."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for group in control_groups():
        if limit := find_in(f"{group}/cpu.max", r"(\d+ \d+)"):  # or it says "max"
            quota, period = map(int, limit.split())
            cores = min(cores, math.ceil(quota / period))
    return cores


def control_groups() -> list[str]:
    """The folders of Linux' control group of this process, and of all around it: each may limit."""
    own = find_in("/proc/self/cgroup", r"(?:^|\n)0::/(.*)")
    names = own.split("/") if own else []
    return [f"/sys/fs/cgroup/{'/'.join(names[:n])}" for n in range(len(names) + 1)]


def as_typed(program: str) -> str:
    """A program beside this Python as one types it, with its path if it is below this directory."""
    path = Path(sys.executable).with_name(program)
    if path.is_relative_to(Path.cwd()):  # its environment may not be activated
        return shlex.quote(str(path.relative_to(Path.cwd())))
    return program


def beside_script(name: str) -> str:
    """The path of a script, as one types it where the running one was started; for a shell."""
    return shlex.quote(str(Path(sys.argv[0]).parent / name))


def command_for(script: str) -> str:
    """What one types to run another script of this repository."""
    return f"{as_typed('python')} {beside_script(script)}"


@lru_cache(maxsize=1)  # the code that runs is the one that was imported
def revision() -> str:
    """The commit of this code, marked if it was changed since; empty without git."""
    if not shutil.which("git"):
        return ""
    command = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent
    return subprocess.run(command, capture_output=True, text=True, cwd=here).stdout.strip()
