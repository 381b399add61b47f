"""The kernels of ten updates, as bench.py makes them: python tests/profile_step.py [its flags]"""

import torch
from torch.profiler import profile

from bench import BenchConfig, Machine
from benchmarks.peers import training
from support.base.console import run_script
from support.base.flags import parse_flags
from support.machine.distributed import start_world


def main(args: list[str]) -> None:
    machine = Machine(parse_flags(BenchConfig, args))
    with start_world(machine.config.device) as world:
        update = training(world, **machine.step("").options)
        for _ in range(3):  # compiles, and makes AdamW's moments
            update()
        torch.get_device_module(world.device).synchronize()
        with profile() as profiler:
            for _ in range(10):
                update()
            torch.get_device_module(world.device).synchronize()
    slowest = "self_device_time_total" if machine.on_gpu else "self_cpu_time_total"
    print(profiler.key_averages().table(slowest, row_limit=40, max_name_column_width=100))


if __name__ == "__main__":
    run_script(main)
