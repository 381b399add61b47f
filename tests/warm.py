"""Runs scripts in processes that are forked from a warm one: PyTorch is imported only once.

`run("train_gpt2.py", *flags)` is what `python train_gpt2.py *flags` is, exit code, streams and
all, without the seconds of importing. The server is single-threaded and computes nothing itself,
so that its children may use threads.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from contract import Done

ROOT = Path(__file__).parent.parent
SERVER = """
import json, os, resource, runpy, signal, sys
sys.path.insert(0, sys.argv[1])
import torch, train_gpt2, sample, hellaswag, transformers
import torch._inductor.compile_fx
import support.peaks
support.peaks.peak_flops = lambda device, dtype: (1e11, "not measured: it takes a second")
from support.tokenizer import tokenizer_json
tokenizer_json()  # a second of work that each checkpoint would wait for
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        streams = [os.open(os.devnull, os.O_RDONLY)]
        new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        streams += [os.open(job[name], new) for name in ("out", "err")]
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        for number in job["closed"]:
            os.close(number)
        for number, name in enumerate(["stdin", "stdout", "stderr"]):
            stream = None
            if number not in job["closed"]:
                stream = open(number, "r" if number == 0 else "w", closefd=False)
            setattr(sys, name, stream)
        os.environ.update(job["env"])
        if job["root"] != sys.argv[1]:  # a copy: its own scripts, and all but the tokenizer
            scripts = [name.removesuffix(".py") for name in os.listdir(job["root"])]
            for name in set(sys.modules) - {"support.tokenizer"}:
                if name.split(".")[0] in scripts:
                    del sys.modules[name]
            sys.path[0] = job["root"]
        others = []
        for rank in range(1, job["ranks"]):
            others.append(os.fork())
            if others[-1] == 0:
                others = []
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                break
        os.chdir(job["cwd"])
        if job["powerless"] and os.geteuid() == 0:
            import ctypes
            version = 0x20080522
            header = (ctypes.c_uint32 * 2)(version, 0)
            assert ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) == 0
        if job["largest_file"]:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
        sys.argv = [job["script"], *job["args"]]
        code = 1
        try:
            runpy.run_path(job["script"], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream and stream.flush()
                except OSError:
                    code = 120
            for other in others:
                code = code or os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
            os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def two_ranks() -> dict:
    """`ranks=2` and what torchrun would put into the environment of the first of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    return dict(ranks=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **sizes)


class Warm:
    """A server; use it as a context manager."""

    def __enter__(self) -> "Warm":
        self.folder = tempfile.TemporaryDirectory()
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(ROOT)],
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
        self,
        script,
        *args,
        root=ROOT,
        cwd=None,
        closed=(),
        largest_file=0,
        powerless=False,
        ranks=1,
        **env,
    ) -> int:
        """Starts a script of `root`, this repository or a copy of it -> its process number.

        `finish` must follow before the next one.
        """
        job = {
            "root": str(root),
            "script": str(root / script),
            "args": [str(arg) for arg in args],
            "cwd": str(cwd or root),
            "closed": list(closed),  # of 0, 1, 2
            "largest_file": largest_file,  # bytes: what a full disk allows to write
            "powerless": powerless,  # even root is bound by permissions then
            "ranks": ranks,  # processes; the others are forked from this one (`two_ranks`)
            "env": env,
            "out": f"{self.folder.name}/out",
            "err": f"{self.folder.name}/err",
        }
        for name in ("out", "err"):  # so that `said` does not read what another script has said
            Path(job[name]).unlink(missing_ok=True)
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def said(self) -> str:
        """What the running script has printed so far, on both streams."""
        streams = [Path(self.folder.name, name) for name in ("out", "err")]
        return "".join(s.read_text(errors="replace") for s in streams if s.exists())

    def finish(self) -> Done:
        code = int(self.server.stdout.readline())
        out, err = (Path(self.folder.name, name).read_bytes() for name in ("out", "err"))
        return Done(code, out.decode(errors="replace"), err.decode(errors="replace"))

    def run(self, script, *args, **options) -> Done:
        self.start(script, *args, **options)
        return self.finish()

    def kill(self, pid: int) -> Done:
        """Kills a started script, its children too, at this moment."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        return self.finish()
