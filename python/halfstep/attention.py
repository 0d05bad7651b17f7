"""attention, attention_varlen: exact attention whose memory grows with the length, not with its square."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import attention_inputs as inputs
from .ops import attention as attention_ops
from .ops.attention_call import AttentionCall


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool | str = False,
    window: int | tuple[int | None, int | None] | None = None, scale: float | None = None,
    softcap: float | None = None, bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """softmax(q k^T * scale) v for each head, without the matrix of scores in memory.

    Scores and softmax are float32 inside (float64 for float64), so are sums; results are rounded once to q's dtype.

    Args:
        q: [batch, heads, length, dim], bfloat16, float16 or float32; on the CPU also float64. Any strides: the views
            of a packed projection, x.view(B, L, H, D).transpose(1, 2), expanded ones. dim is a multiple of 8, up to
            256. Under torch.autocast q, k and v are cast to its dtype (float64 is not).
        k, v: [batch, kv_heads, key length, dim] of q's dtype. heads is a multiple of kv_heads, and query head h reads
            head h // (heads // kv_heads); nothing is expanded. v's dim may be another one.
        mask: bool, broadcastable to [batch, heads, length, key length] (fewer dimensions too: a padding mask [batch,
            key length] is mask[:, None, None]); True = is visible. What is hidden has weight 0, by which its value is
            still multiplied as elsewhere in torch: NaN and infinity do not belong in padding.
        causal: True or "bottom-right": the last query sees all keys, the one before it all but the last, and so on;
            "top-left": query i sees keys 0 to i. They differ where the lengths do. Some queries see nothing if there
            are more of them than keys.
        window: how many keys before and after its own place a query sees: (left, right), w for (w, w), None or -1 for
            no limit. With `causal`, right is 0.
        scale: of the scores; None = dim ** -0.5.
        softcap: c > 0 makes c * tanh(score / c) of a scaled score; None or 0 = none.
        bias: added to the scaled (and capped) scores; broadcastable as the mask; float32, bfloat16 or float16 (float64
            with float64), -inf hides a key. Has a gradient, in its own shape and dtype. Autocast leaves it as it is.
        alibi_slopes: [heads] or [batch, heads], float32, no gradient: slope * distance is taken from a score, where
            distance is |query's place - key's| and the last query is at the last key ("top-left": 0 at 0).
        dropout_p: in [0, 1), of the weights; what is kept is divided by 1 - dropout_p. A weight's fate depends on the
            seed, batch, head, query and key index alone, so it is the same on every backend.
        seed: an int (modulo 2**64) or an int64 tensor of one element on q's device, read by the kernels. None: drawn
            there with torch.randint, which torch.manual_seed() and checkpointing repeat.
        return_lse: also return the natural log of the sum of a row's exponents.

    Returns:
        out [batch, heads, length, dim of v] in q's dtype, its memory in q's order of dimensions; with `return_lse`
        (out, lse), lse float32 (float64 for float64), [batch, heads, length]. Both are differentiable. A query that
        sees no key gets out 0, lse -inf and gradient 0. Lengths may be 0. Results and gradients repeat bit for bit.

    Memory: beside the results nothing of the size length * key length. Kept for backward, only if a gradient is needed:
    q, k, v, out, mask and bias themselves, and 4 bytes for each row and head (8 with a bias).

    Unlike torch's scaled_dot_product_attention: `is_causal` there is "top-left" here (equal lengths: the same); there a
    query that sees nothing can be NaN; mask and bias are two arguments here; grouped heads need no flag.

    float32 on a GPU is true float32, and TF32 where torch.set_float32_matmul_precision() or
    torch.backends.cuda.matmul.fp32_precision allow it for torch's own products.

    Raises:
        TypeError: another, or a mixed, dtype; a float mask; a sparse, nested or distributed tensor.
        ValueError: shapes, devices or settings that do not fit; alibi_slopes that require a gradient.
        RuntimeError: a second derivative (gradient penalties), when it is asked for.

    Source: Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4; Dao 2023 (arXiv:2307.08691), section 3; the running
    maximum: Milakov and Gimelshein 2018 (arXiv:1805.02867); ALiBi: Press et al. 2021 (arXiv:2108.12409), section 3;
    softcap: Gemma 2 (arXiv:2408.00118), section 2.

    Example:
        >>> q, k, v = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 9, 64), torch.randn(2, 2, 9, 64)
        >>> out, lse = hs.attention(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 5, 64]), torch.Size([2, 8, 5]))
    """
    q, k, v = _read_qkv(q, k, v, ("batch", "heads", "length", "dim"))
    mask = None if mask is None else inputs.read_mask(mask, q, k)
    bias = None if bias is None else inputs.read_bias(bias, q, k)
    if alibi_slopes is not None:
        alibi_slopes = inputs.read_slopes(alibi_slopes, q, q.shape[1], q.shape[0], "batch")
    scale, softcap, dropout_p = inputs.read_numbers(q.shape[3], scale, softcap, dropout_p)
    left, right, top_left = inputs.read_window(causal, window)
    seed = inputs.read_seed(seed, dropout_p, q.device)
    out, lse = attention_ops.attention(
        AttentionCall(
            q, k, v, mask, bias, alibi_slopes, None, None, seed, scale, softcap, left, right, top_left, dropout_p
        )
    )
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, causal: bool | str = False, window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None, softcap: float | None = None, alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """`attention` within segments of different lengths that lie one after another, without padding.

    Rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q see rows cu_seqlens_k[i] to cu_seqlens_k[i + 1] of k and v.
    `causal`, `window` and `alibi_slopes` count places within a segment, each with its own lengths.

    Args:
        q: [total, heads, dim]. k, v: [total of keys, kv_heads, dim]; dtypes, sizes and strides as in `attention`.
        cu_seqlens_q, cu_seqlens_k: [segments + 1], int32 (int64 is converted), on q's device: running sums of the
            segments' lengths, from 0 to at most the number of rows. Segments may be empty on either side: queries
            without keys get out 0, lse -inf and gradient 0, and so do the rows after the last segment, which a buffer
            of fixed size may have. Other values are refused on the CPU. On a GPU, where looking at them would wait,
            results are NaN in all rows if one of them decreases or leaves the rows; no memory outside the tensors is
            touched.
        max_seqlen_q, max_seqlen_k: accepted, so that flash-attn's calls fit; neither needed nor trusted.
        alibi_slopes: [heads] or [segments, heads], float32.
        causal, window, scale, softcap, dropout_p, seed, return_lse: as in `attention`; dropout counts a segment as a
            batch element.

    Returns:
        out [total, heads, dim of v]; with `return_lse` (out, lse), lse float32 [heads, total].

    Memory, precision, errors, source: as `attention`; also ValueError for `cu_seqlens_*` that do not fit each other.

    Example:
        >>> q, ends = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)  # of 3 and of 4 rows
        >>> out = hs.attention_varlen(q, q, q, ends, ends, causal=True)
        >>> torch.equal(out[:1], q[:1])  # the first row of a segment sees itself alone
        True
    """
    q, k, v = _read_qkv(q, k, v, ("total", "heads", "dim"))
    cu_seqlens_q, cu_seqlens_k = inputs.read_boundaries(cu_seqlens_q, cu_seqlens_k, q.device)
    if alibi_slopes is not None:
        segments = cu_seqlens_q.shape[0] - 1
        alibi_slopes = inputs.read_slopes(alibi_slopes, q, q.shape[1], segments, "segments")
    scale, softcap, dropout_p = inputs.read_numbers(q.shape[2], scale, softcap, dropout_p)
    left, right, top_left = inputs.read_window(causal, window)
    seed = inputs.read_seed(seed, dropout_p, q.device)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out, lse = attention_ops.attention(
        AttentionCall(
            q, k, v, None, None, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seed, scale, softcap, left, right, top_left,
            dropout_p,
        )
    )  # fmt: skip
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def _read_qkv(q: Any, k: Any, v: Any, dims: tuple[str, ...]) -> tuple[Tensor, ...]:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        inputs.check_tensor(tensor, name)
    q, k, v = inputs.cast_for_autocast((q, k, v))
    inputs.check_qkv(q, k, v, dims)
    return q, k, v
