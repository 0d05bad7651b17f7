"""tune_attention: other sizes of the attention kernels' tiles, where those of the table are not the fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import attention
from .ops import attention_tuning
from .ops.backend import why_no_triton_attention


def tune_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> dict[str, attention_tuning.TunedTile]:
    """Times the tiles that `attention`'s kernels may have on this GPU, and keeps the fastest for calls like this one.

    Call it before a training, once for each shape that it uses: it runs the call and its gradients some hundred times
    and compiles each kernel a few times (seconds to a minute). Without it nothing is ever timed: tiles come from a
    table. What was found holds in this process, for the same device, dims, dtype and kinds of options, and for numbers
    of batches and lengths between the same powers of two. Results differ by rounding: sums have another order.

    Args:
        q, k, v: as in `attention`, on the GPU; contents do not matter. They are not changed.
        options: as in `attention`. A bias that requires a gradient has its kernel timed too.

    Returns:
        By kernel ("forward"; "keys": gradients of k and v; "queries": of q; "bias"): queries and keys of its tile,
        warps, stages, ms (milliseconds, the median, of the whole forward or backward pass with it) and ms_before
        (with the tile that it had).

    Memory: the call's results and gradients.

    Raises:
        RuntimeError: Triton's kernels do not run on this device.
        TypeError, ValueError: as `attention`.

    Example:
        >>> q = torch.randn(2, 8, 1024, 64, device="cuda" if torch.cuda.is_available() else "cpu")
        >>> tiles = hs.tune_attention(q, q, q, causal=True) if q.is_cuda else {}  # before a training with such calls
    """
    why_not = why_no_triton_attention(q.device)
    if why_not is not None:
        raise RuntimeError(
            f"tune_attention times Triton's kernels on a GPU, got tensors on {q.device}: {why_not}. There is nothing "
            "to tune here: call attention() as it is"
        )
    options = {**options, "return_lse": False}
    if options.get("dropout_p") and options.get("seed") is None:
        options["seed"] = 0  # a drawn one would move the generator of what is trained afterwards
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    bias = options.get("bias")
    if bias is not None and bias.requires_grad:
        options["bias"] = bias.detach().requires_grad_()
        inputs.append(options["bias"])
    with torch.enable_grad():
        out = attention(*inputs[:3], **options)
    d_out = torch.ones_like(out)

    def forward() -> None:
        with torch.no_grad():
            attention(*inputs[:3], **options)

    def backward() -> None:
        torch.autograd.grad(out, inputs, d_out, retain_graph=True)

    return attention_tuning.tune(forward, backward)
