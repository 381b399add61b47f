"""Runs scripts in processes that are forked from a warm one: PyTorch is imported only once.

`run("train_gpt2.py", *flags)` is what `python train_gpt2.py *flags` is, exit code, streams and
all, without the seconds of importing. The server has a single thread and computes nothing itself,
so its children may use threads.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

from contract import Done

ROOT = Path(__file__).parent.parent
SERVER = "import sys; sys.path[:0] = sys.argv[1:]; import warm; warm.serve()"

# -- the server


def serve() -> None:
    """Reads jobs from stdin, one per line. Prints the process's number, later its exit code."""
    for name in ("torch._inductor.compile_fx", "transformers", "hellaswag", "train_gpt2"):
        importlib.import_module(name)
    from support.text.tokenizer import gpt2

    _ = gpt2().encoding
    for line in sys.stdin:
        job = json.loads(line)
        ranks: list[int] = []
        for rank in range(job["ranks"]):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                work(job, rank)
            os.setpgid(ranks[-1], ranks[0])
        print(ranks[0], flush=True)
        print(wait_for_all(ranks), flush=True)


def wait_for_all(ranks: list[int]) -> int:
    """Waits for all processes -> the first exit code that is not 0. A failure ends the others."""
    failed = 0
    for i, pid in enumerate(ranks):
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code
            for other in ranks[i + 1 :]:
                os.kill(other, signal.SIGTERM)  # as torchrun does
    return failed


def work(job: dict, rank: int) -> NoReturn:
    """Runs a script in this process, forked from the server."""
    sys.stdin = redirect(0, os.devnull, "r")
    sys.stdout = redirect(1, job["out"], "a")
    sys.stderr = redirect(2, job["err"], "a")
    os.environ.update(job["env"])
    if job["ranks"] > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    root = job["root"]
    sys.path.insert(0, root)
    if root != str(ROOT):  # a copy of the repository imports its own files
        for name in list(sys.modules):
            if Path(root, name.split(".")[0]).exists() or Path(root, f"{name}.py").exists():
                del sys.modules[name]
    os.chdir(job["cwd"])
    if job["powerless"] and os.geteuid() == 0:
        drop_capabilities()
    if job["largest_file"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
    sys.argv = [job["script"], *job["args"]]
    code = 0
    try:
        runpy.run_path(job["script"], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def redirect(number: int, path: str, mode: str):
    """Makes a standard stream of this process read or write a file."""
    with open(path, mode) as file:
        os.dup2(file.fileno(), number)
    return open(number, mode, buffering=1, closefd=False)  # line by line


def drop_capabilities() -> None:
    """From here on, permissions bind even root."""
    version = 0x20080522
    header = (ctypes.c_uint32 * 2)(version, 0)
    assert ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) == 0


# -- the client


def two_ranks() -> dict:
    """`ranks=2` and what torchrun would put into the environment of both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    return dict(ranks=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **sizes)


class Warm:
    """A server; use it as a context manager."""

    def __enter__(self) -> "Warm":
        self.folder = tempfile.TemporaryDirectory()
        self.out = Path(self.folder.name, "out")
        self.err = Path(self.folder.name, "err")
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(ROOT), str(ROOT / "tests")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )
        return self

    def __exit__(self, *_) -> None:
        self.server.stdin.close()
        self.server.wait(timeout=60)
        self.folder.cleanup()

    def start(
        self, script, *args, root=ROOT, cwd=None, largest_file=0, powerless=False, ranks=1, **env
    ) -> int:
        """Starts a script -> its process number. Call `finish` before the next `start`.

        root: this repository or a copy of it. largest_file: the bytes that a full disk lets it
        write. powerless: permissions bind even root. ranks: with more than 1, see `two_ranks`.
        """
        job = {
            "root": str(root),
            "script": str(root / script),
            "args": [str(arg) for arg in args],
            "cwd": str(cwd or root),
            "largest_file": largest_file,
            "powerless": powerless,
            "ranks": ranks,
            "env": env,
            "out": str(self.out),
            "err": str(self.err),
        }
        self.out.write_bytes(b"")
        self.err.write_bytes(b"")
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def finish(self) -> Done:
        code = int(self.server.stdout.readline())
        out = self.out.read_text(errors="replace")
        return Done(code, out, self.err.read_text(errors="replace"))

    def run(self, script, *args, **options) -> Done:
        self.start(script, *args, **options)
        return self.finish()

    def kill(self, pid: int) -> Done:
        """Kills a started script, its children too, at this moment."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        return self.finish()
