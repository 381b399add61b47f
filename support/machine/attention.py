"""Attention's backward pass on a CPU in bfloat16. torch.compile uses it instead of PyTorch's.

PyTorch's kernel works on small tiles, at a tenth of the speed of a CPU's bfloat16 units. This code
works in a few large products, and the compiler fuses the rest.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # the fewest keys at a time; at most four blocks, because each is compiled


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """dq, dk, dv from dy, the gradient of y. All are (B, nh, T, hs); lse is (B, nh, T).

    As in FlashAttention (Dao et al. 2022, appendix B.2), for a block of keys and all later queries:
    s = q kᵀ scale, p = exp(s - lse), dv = pᵀ dy, ds = p (dy vᵀ - rowsum(dy y)) scale, dq = ds k,
    dk = dsᵀ q. Rounding to bfloat16 changes an s of 40 by 0.1, and p by a tenth. So we subtract lse
    inside the product (`minus`), and the row sums, too. Results that matter are then near zero and
    lose little to rounding.
    """
    plain = is_causal and attn_mask is None and dropout_p == 0 and q.shape == k.shape
    if q.dtype != torch.bfloat16 or not plain:
        return NotImplemented  # PyTorch's kernel
    T, hs = q.shape[-2:]
    scale = scale or 1 / math.sqrt(hs)
    q_lse = minus(q, lse[..., None] / scale)
    dy_sum = minus(dy, (dy.float() * y.float()).sum(-1, keepdim=True))
    ones = k.new_ones(*k.shape[:-1], 2)
    k_1 = torch.cat([k, ones], -1)
    v_1 = torch.cat([v, ones], -1)
    token = torch.arange(T, device=q.device)
    dq = torch.zeros_like(q, dtype=torch.float32)
    dk = []
    dv = []
    block = max(BLOCK, math.ceil(T / 4))
    for start in range(0, T, block):
        end = min(start + block, T)
        visible = token[start:end] <= token[start:, None]
        s = (q_lse[..., start:, :] @ k_1[..., start:end, :].mT).float() * scale
        p = torch.where(visible, s.exp(), 0)
        dp = (dy_sum[..., start:, :] @ v_1[..., start:end, :].mT).float()
        ds = (p * dp * scale).to(q.dtype)
        # The compiler refuses += here, and adds all blocks in one pass.
        dq = dq + F.pad(ds @ k[..., start:end, :], (0, 0, start, 0))
        dk.append(ds.mT @ q[..., start:, :])
        dv.append(p.to(q.dtype).mT @ dy[..., start:, :])
    return dq.to(q.dtype), torch.cat(dk, -2), torch.cat(dv, -2)


def minus(x: Tensor, subtracted: Tensor) -> Tensor:
    """x (…, hs) with two more columns. Their product with ones is -subtracted (…, 1), to 16 bits.

    A product is summed in float32 and rounded at the end. Dekker's method (1971) splits off the
    first 8 bits. The compiler would remove a cast to bfloat16 and back.
    """
    large = (2**16 + 1) * subtracted
    high = large - (large - subtracted)
    return torch.cat([x, -high.to(x.dtype), (high - subtracted).to(x.dtype)], -1)
