"""The loss' kernel against PyTorch's float32, by Triton's interpreter on the CPU."""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

from support.machine.loss_kernel import BLOCK, kernel


def find_problems(dtype: torch.dtype, rows: int, V: int, padded: int) -> list[str]:
    torch.manual_seed(0)
    logits = (5 * torch.randn(rows, padded)).to(dtype)
    logits[0, 1] = 60  # a softmax that is nearly one-hot
    logits[:, V:] = 70  # the padding does not count
    targets = torch.randint(0, V, (rows,), dtype=torch.int32)
    targets[-1] = -1
    exact = logits[:, :V].float().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        exact, targets.long(), ignore_index=-1, reduction="none"
    )
    [gradient] = torch.autograd.grad(expected[:-1].sum(), exact)
    losses = torch.empty(rows)
    kernel[(rows,)](logits, targets, losses, V, padded, True, BLOCK)
    case = f"{rows} rows of {V} logits in {dtype}"
    problems = []
    if not torch.allclose(losses, expected.detach(), rtol=1e-5, atol=1e-5):
        problems.append(f"{case}: other losses")
    if not torch.allclose(logits[:-1, :V].float(), gradient[:-1], rtol=0.01, atol=1e-6):
        problems.append(f"{case}: other gradients")
    if logits[:, V:].any():
        problems.append(f"{case}: the padding has gradients")
    return problems


if __name__ == "__main__":
    cases = [(torch.bfloat16, 3, 50257, 50304), (torch.float32, 4, 1000, 1024)]
    cases += [(torch.float16, 2, 4097, 4224), (torch.float32, 2, BLOCK, BLOCK)]
    problems = [problem for case in cases for problem in find_problems(*case)]
    Path(sys.argv[1]).write_text(json.dumps([{}, problems]))
