"""Which updates a run skips (float16 overflow, spikes), and its end on a NaN or infinity.

`run` is train_gpt2.Run.
"""

import math
import shlex
import statistics
import sys

import torch

from support.common import UserError

SPIKE_WINDOW = 128  # updates, as in llm.c's -sl and -sg
MOST_SKIPPED = 50  # updates in a row


def is_spike(value: float, recent: list[float], limit: float) -> bool:
    """Whether a value is more than `limit` standard deviations above the mean of a full window."""
    if len(recent) < SPIKE_WINDOW:
        return False
    return value > statistics.fmean(recent) + limit * statistics.pstdev(recent)


def judge_update(run, loss: float, norm: float) -> bool:
    """Whether to make an update; if not, run.skipped says why. Every update is to be judged once.

    Raises UserError when too many in a row were skipped: nothing is learned any more.
    """
    run.skipped = ""
    if not math.isfinite(norm):
        run.skipped = "overflow in float16"  # in another dtype stop_at_nan ends the run
    elif run.config.skip_spikes:
        for name, value in {"loss": loss, "norm": norm}.items():
            if is_spike(value, run.recent[name], run.config.skip_spikes):
                run.skipped = f"spike of the {name}"
            run.recent[name] = [*run.recent[name], value][-SPIKE_WINDOW:]
    if not run.skipped:
        run.skipped_in_a_row = 0
        return True
    run.skipped_in_a_row += 1
    if run.skipped_in_a_row == MOST_SKIPPED:
        what = (
            f"{MOST_SKIPPED} updates in a row were skipped, the last one because of: {run.skipped}"
        )
        raise UserError(explain_nan(run, what))
    return False


def stop_at_nan(run, loss: float, norm: float) -> None:
    """Raises UserError with what to know and to do, unless float16 merely overflowed."""
    if math.isfinite(loss) and (math.isfinite(norm) or run.scaler.is_enabled()):
        return  # an overflow in float16 is refused by judge_update; the scaler lowers its scale
    sequences = run.config.total_batch_size // run.config.sequence_length
    what = (
        f"the loss is {loss} and the gradient norm {norm}, "
        f"on sequences {run.cursor} to {run.cursor + sequences - 1}"
    )
    raise UserError(explain_nan(run, what))


def explain_nan(run, what: str) -> str:
    """What happened at which step, and the two ways to go on."""
    find = 'python -c "import train_gpt2; train_gpt2.find_nan()"'
    return (
        f"step {run.step}: {what}; last good checkpoint: {run.last_saved or 'none yet'}. "
        f"To find the operation: {find} {shlex.join(sys.argv[1:])} --no-compile --resume auto. "
        "To go on: a lower --learning-rate, or --dtype float32."
    )


def watch_for_nan(model_class: type) -> None:
    """From now on the first NaN raises UserError.

    In the forward pass it names the module (infinity counts too), in the backward pass the
    operation. Slow: only for a rerun.
    """
    names: dict[torch.nn.Module, str] = {}

    def before(module: torch.nn.Module, _inputs) -> None:
        if isinstance(module, model_class):
            names.update({part: name for name, part in module.named_modules()})

    def after(module, _inputs, output) -> None:
        if isinstance(output, torch.Tensor) and not output.isfinite().all():
            raise UserError(
                f"the first output that is not finite is that of {names[module]}, {module}"
            )

    torch.nn.modules.module.register_module_forward_pre_hook(before)
    torch.nn.modules.module.register_module_forward_hook(after)
    torch.autograd.set_detect_anomaly(True)
