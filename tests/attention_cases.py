"""The cases of attention that every backend must get right: small, named for what they are about."""

from __future__ import annotations

import torch
from attention_case import Case

LENGTHS = [
    Case("one query and one key", (1, 1)),
    Case("one query, a block of keys less one", (1, 15), right=0),
    Case("decoding: one query sees all keys", (1, 130), heads=(4, 2), right=0, core=True),
    Case("a block of 16", (16, 16), right=0),
    Case("a block of 16 and one", (17, 17), right=0),
    Case("a block of 64 less one", (63, 63)),
    Case("a block of 64", (64, 64), right=0),
    Case("a block of 64 and one", (65, 65), right=0),
    Case("several blocks", (130, 130), right=0),
    Case("several blocks, nothing masked", (130, 130), heads=(2, 1)),
    Case("no queries", (0, 17)),
    Case("no keys", (17, 0), core=True),
    Case("no queries and no keys", (0, 0), right=0),
    Case("fewer queries than keys, all visible", (17, 65)),
    Case("more queries than keys, all visible", (65, 17)),
]

ALIGNMENTS = [
    Case("causal, bottom right, fewer queries", (17, 65), right=0, core=True),
    Case("causal, bottom right, more queries: the first see nothing", (65, 17), right=0, core=True, d_lse=True),
    Case("causal, top left, fewer queries", (17, 65), right=0, top_left=True),
    Case("causal, top left, more queries", (65, 17), right=0, top_left=True),
    Case("causal, top left, one query", (1, 17), right=0, top_left=True),
    Case("causal, bottom right, many more queries", (130, 15), right=0),
    Case("top left alone hides nothing", (17, 33), top_left=True),
]

WINDOWS = [
    Case("window to the left", (65, 65), left=7),
    Case("window to the right", (65, 65), right=5),
    Case("window to both sides", (65, 65), left=9, right=4, core=True),
    Case("window of the diagonal alone", (33, 33), left=0, right=0),
    Case("causal window", (130, 130), left=20, right=0, core=True),
    Case("causal window, fewer queries", (33, 130), left=20, right=0),
    Case("causal window, more queries: rows at both ends see nothing", (130, 33), left=11, right=0),
    Case("window, top left, more queries: the last see nothing", (65, 17), left=3, right=2, top_left=True, core=True),
    Case("window, top left, fewer queries", (17, 65), left=3, right=2, top_left=True),
    Case("window to the left, fewer queries", (17, 65), left=7),
    Case("window to the right, more queries", (65, 17), right=7),
    Case("window wider than everything", (17, 33), left=10**9, right=10**9),
    Case("window with a boolean mask", (33, 65), left=9, right=9, mask="B1QK"),
]

MASKS = [
    Case("mask in full", (33, 65), mask="BHQK", rows=True, core=True),
    Case("mask for all heads", (33, 33), mask="B1QK", rows=True, d_lse=True),
    Case("mask for all batch elements and heads", (33, 33), mask="11QK", rows=True),
    Case("mask of keys", (33, 65), mask="B11K", core=True),
    Case("mask of keys hides everything of some heads", (17, 33), mask="BH1K", rows=True),
    Case("mask of queries", (33, 33), mask="B1Q1", rows=True),
    Case("mask of queries for all", (33, 33), mask="11Q1"),
    Case("mask of batch elements", (17, 17), mask="B111"),
    Case("mask and causal", (65, 65), heads=(4, 2), mask="B11K", right=0),
    Case("one key each", (33, 33), mask="BHQK", one_key=True),
    # A finite number that stands for -inf would win against it.
    Case("the only visible score is very negative", (17, 17), mask="11QK", one_key=True, scale=-1e4, same_qk=True,
         core=True),
]  # fmt: skip

BIASES = [
    Case("bias in full", (33, 65), bias="BHQK", core=True),
    Case("bias for all batch elements", (33, 33), bias="1HQK"),
    Case("bias for all heads", (33, 33), heads=(4, 2), bias="B1QK"),
    Case("bias for all batch elements and heads", (33, 33), bias="11QK", bias_dtype=torch.float32),
    Case("bias of keys", (33, 65), bias="B11K"),
    Case("bias of keys and heads", (33, 33), bias="1H1K"),
    Case("bias of keys for all", (17, 33), bias="111K"),
    Case("bias of queries", (33, 17), bias="11Q1"),
    Case("bias of queries and heads", (33, 17), bias="BHQ1"),
    Case("bias of heads", (17, 17), bias="1H11"),
    Case("bias of batch elements", (17, 17), bias="B111"),
    Case("one bias", (17, 17), bias="1111"),
    Case("bias and causal, fewer queries", (17, 65), bias="1HQK", right=0, d_lse=True),
    Case("bias and causal, more queries", (65, 17), heads=(2, 1), bias="BHQK", right=0, bias_dtype=torch.float32),
    Case("bias, window and mask", (65, 65), bias="1HQK", left=9, right=3, mask="B11K"),
    Case("bias of -inf", (33, 33), bias="B1QK", bias_low="-inf"),
    Case("bias of -inf, whole rows", (33, 33), bias="BHQK", bias_low="-inf", rows=True, core=True),
    Case("bias of -inf in float32, whole rows", (33, 33), bias="BHQK", bias_low="-inf", rows=True,
         bias_dtype=torch.float32),
    Case("bias of -inf for keys", (33, 33), bias="B11K", bias_low="-inf"),
    Case("bias of the dtype's minimum", (33, 33), bias="B1QK", bias_low="min"),
    Case("bias of the dtype's minimum, whole rows", (33, 33), bias="BHQK", bias_low="min", rows=True),
    # lse swallows the logarithm of the number of keys
    Case("bias of float32's minimum, whole rows", (33, 33), bias="1HQK", bias_low="min", rows=True,
         bias_dtype=torch.float32, core=True),
    Case("bias of float32's minimum, whole rows, causal", (33, 33), heads=(4, 2), bias="B1QK", bias_low="min",
         rows=True, bias_dtype=torch.float32, right=0, d_lse=True),
]  # fmt: skip

SCORES = [
    Case("ALiBi", (65, 65), alibi="H", right=0, core=True),
    Case("ALiBi for each batch element, fewer queries", (17, 65), alibi="BH"),
    Case("ALiBi, more queries, both directions", (65, 17), alibi="H"),
    Case("ALiBi, top left, fewer queries", (17, 65), alibi="BH", top_left=True, right=0),
    Case("ALiBi, window and grouped heads", (65, 65), heads=(4, 2), alibi="BH", left=9, right=3),
    Case("softcap", (33, 33), softcap=5.0, right=0, core=True),
    Case("softcap of huge scores", (33, 33), softcap=30.0, scale=50.0, size=4.0),
    Case("softcap below every score", (33, 33), softcap=0.01, d_lse=True),
    Case("softcap and bias", (33, 33), softcap=2.0, bias="B1QK"),
    Case("softcap and ALiBi", (33, 33), softcap=2.0, alibi="H", right=0),
    Case("scale of 0", (33, 33), scale=0.0),
    Case("negative scale", (33, 33), scale=-0.3, right=0),
    Case("large scale: one key takes all", (33, 33), scale=4.0, d_lse=True),
    Case("tiny scale", (33, 33), scale=1e-6),
    Case("large queries", (33, 33), size=30.0, right=0),
    Case("gradient of lse", (33, 65), right=0, d_lse=True, heads=(4, 2), core=True),
]

HEADS = [
    Case("grouped heads", (33, 33), heads=(4, 2), right=0, core=True),
    Case("grouped heads in threes", (17, 33), heads=(6, 2)),
    Case("one key head", (33, 33), heads=(4, 1), mask="BHQK"),
    Case("one key head, more queries", (65, 17), heads=(3, 1), right=0),
    *(Case(f"head dim {dim}", (33, 33), dims=(dim, dim), right=0) for dim in (8, 24, 40, 64, 72, 80, 96, 128)),
    *(Case(f"head dim {dim}", (17, 33), dims=(dim, dim)) for dim in (192, 256)),
    Case("wide keys, narrow values", (33, 33), dims=(40, 8), right=0, core=True),
    Case("narrow keys, wide values", (33, 33), dims=(8, 72)),
    Case("wide keys, narrow values, grouped", (17, 33), heads=(4, 2), dims=(192, 128)),
]

DROPOUT = [
    Case("dropout", (33, 65), dropout_p=0.3, core=True),
    Case("dropout of almost everything", (33, 33), dropout_p=0.95),
    Case("dropout of almost nothing", (33, 33), dropout_p=1e-3),
    Case("dropout, causal, grouped heads", (65, 67), heads=(4, 2), dropout_p=0.2, right=0, d_lse=True),
    Case("dropout, bias and mask", (33, 33), dropout_p=0.5, bias="1HQK", mask="B11K"),
    Case("dropout, window, ALiBi, softcap", (65, 65), dropout_p=0.1, left=9, right=3, alibi="H", softcap=3.0),
]

LAYOUTS = [
    Case("packed q, k and v", (33, 33), layout="packed", right=0, core=True),
    Case("packed, grouped heads", (33, 33), heads=(4, 2), layout="packed"),
    Case("transposed", (33, 65), layout="transposed", d_out="transposed", right=0),
    Case("transposed, grouped heads and bias", (33, 33), heads=(4, 2), layout="transposed", bias="BHQK"),
    Case("expanded k and v", (33, 33), heads=(4, 4), layout="expanded heads", core=True),
    Case("odd rows", (33, 33), layout="odd rows", d_out="odd rows", right=0),
    Case("misaligned", (33, 33), layout="offset", d_out="offset"),
    Case("strided head dim", (33, 33), layout="strided", d_out="strided"),
    Case("gradient of a sum", (33, 33), d_out="expanded", right=0, core=True),
    Case("gradient the same for each row", (17, 33), heads=(4, 2), d_out="expanded rows"),
    Case("gradient in another order", (33, 33), d_out="transposed", layout="strided"),
]

VARLEN = [
    Case("varlen", q_lengths=(17, 33, 5), k_lengths=(17, 33, 5), right=0, core=True),
    Case("varlen, grouped heads", q_lengths=(17, 16, 5), k_lengths=(33, 15, 64), heads=(4, 2)),
    Case("varlen, fewer and more queries, causal", q_lengths=(5, 33, 1), k_lengths=(33, 5, 17), right=0, d_lse=True),
    Case("varlen, causal, top left", q_lengths=(5, 33, 1), k_lengths=(33, 5, 17), right=0, top_left=True),
    Case("varlen, segments without queries, keys, both", q_lengths=(5, 0, 7, 0, 9), k_lengths=(5, 6, 0, 0, 9),
         right=0, core=True),
    Case("varlen, the first and the last are empty", q_lengths=(0, 17, 0), k_lengths=(0, 17, 0)),
    Case("varlen, one token in all", q_lengths=(0, 1, 0), k_lengths=(0, 1, 0)),
    Case("varlen, one segment", q_lengths=(33,), k_lengths=(33,), right=0),
    Case("varlen, nothing at all", q_lengths=(0, 0), k_lengths=(0, 0)),
    Case("varlen, rows that no segment covers", q_lengths=(17, 5), k_lengths=(9, 20), uncovered=(3, 6), d_lse=True),
    Case("varlen, window", q_lengths=(33, 5, 70), k_lengths=(40, 5, 70), left=7, right=3),
    Case("varlen, ALiBi of each segment", q_lengths=(17, 5), k_lengths=(17, 20), alibi="BH", right=0),
    Case("varlen, ALiBi and softcap", q_lengths=(17, 5), k_lengths=(17, 20), alibi="H", softcap=3.0),
    Case("varlen, dropout", q_lengths=(17, 0, 5), k_lengths=(19, 3, 20), dropout_p=0.3, heads=(4, 2), core=True),
    Case("varlen, packed", q_lengths=(17, 20), k_lengths=(17, 20), layout="packed", right=0),
    Case("varlen, transposed", q_lengths=(17, 20), k_lengths=(19, 20), layout="transposed", d_out="expanded",
         dims=(24, 40)),
    Case("varlen, a segment longer than a block", q_lengths=(3, 130), k_lengths=(3, 130), right=0),
]  # fmt: skip

CASES = [*LENGTHS, *ALIGNMENTS, *WINDOWS, *MASKS, *BIASES, *SCORES, *HEADS, *DROPOUT, *LAYOUTS, *VARLEN]
CORE = [case for case in CASES if case.core]
