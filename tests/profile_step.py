"""The kernels of ten updates: python tests/profile_step.py [flags of bench.py]

The step is training's own, as bench.py takes it: an update of one micro-batch.
"""

from torch.profiler import profile

from bench import BenchConfig, Machine
from benchmarks.peers import training
from support.common import parse_flags, run_script
from support.device import synchronize
from support.distributed import World


def main(args: list[str]) -> None:
    machine = Machine(parse_flags(BenchConfig, args))
    side = machine.step("")
    with World(machine.config.device) as world:
        update = training(world, **side.options)
        for _ in range(3):  # compiles, and makes AdamW's moments
            update()
        synchronize(world.device)
        with profile() as profiler:
            for _ in range(10):
                update()
            synchronize(world.device)
    slowest = "self_device_time_total" if machine.on_gpu else "self_cpu_time_total"
    print(profiler.key_averages().table(slowest, row_limit=40, max_name_column_width=100))


if __name__ == "__main__":
    run_script(main)
