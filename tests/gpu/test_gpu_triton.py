"""What Triton alone has: kernels that are compiled at their first use, and tables that later calls find on the device.

Guards: a table that another stream's upload has yet to fill, that an eager step writes over though a graph reads it, or
that is freed with a graph still there; a machine where nothing is compiled at install time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial import ordinary
from bits import assert_all_same_bits
from optimizer_runs import parameters
from twins import BFLOAT16, FLOAT32, Twins, moved, quiet

import halfstep as hs
from halfstep.ops import backend, triton_gpu
from halfstep.ops.optimizer import norm_from

BACKENDS = ["triton"]
WITHOUT_CUDA_MODULE = (
    "import runpy, sys; sys.modules['halfstep._cuda'] = None; runpy.run_module('first_step', run_name='__main__')"
)


# ---- compiled at the first use ---------------------------------------------------------------------------------------
def first_step(gpu: Any, cache: Path) -> tuple[str, dict[str, int]]:
    """What first_step.py tells where halfstep._cuda is not built; and the compiled kernels, with their dates."""
    command = [sys.executable, "-c", WITHOUT_CUDA_MODULE, *([] if gpu.compiles else ["--stand-in"])]
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    binaries = [path for path in cache.rglob("*") if path.suffix in (".cubin", ".hsaco")]
    return done.stdout, {str(path.relative_to(cache)): path.stat().st_mtime_ns for path in binaries}


def test_a_second_process_compiles_nothing(gpu: Any, tmp_path: Path) -> None:
    """The first one compiles each pass; neither has a native module for the GPU."""
    told, compiled = first_step(gpu, tmp_path)
    assert told.split()[0] == "triton"
    kernels = {Path(name).stem for name in compiled}
    assert kernels == ({"grad_stats_kernel", "prologue_kernel", "update_kernel"} if gpu.compiles else set())
    assert first_step(gpu, tmp_path) == (told, compiled)


def test_an_optimizer_that_asks_for_triton(gpu: Any) -> None:
    """Where native kernels may be there too."""

    def asking(params: Any, **options: Any) -> hs.AdamW:
        there = params[0].device.type == "cuda"
        return hs.AdamW(params, backend="triton" if there else None, **options)

    twins = Twins(gpu, BFLOAT16, cls=asking, max_grad_norm=0.5)
    for t in range(2):
        twins.backward(t)
        twins.host.step()
        twins.there.step()
        twins.assert_same()


# ---- tables on the device --------------------------------------------------------------------------------------------
def lists(gpu: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    src = [moved(ordinary(shape, FLOAT32, 7), gpu.device) for shape in gpu.shapes([(5,), (70001,), (300,)])]
    return [torch.zeros_like(s, dtype=BFLOAT16) for s in src], src


def rounded(src: list[torch.Tensor]) -> list[torch.Tensor]:
    return [s.cpu().bfloat16() for s in src]


def test_a_table_that_another_stream_is_about_to_fill(gpu: Any) -> None:
    """The same lists on two streams: the second one must not read what the first one's copy has not brought yet."""
    dst, src = lists(gpu)
    with gpu.used():
        hs.cast_([d.clone() for d in dst], src)  # compiled from here on
        with gpu.side_stream():  # behind a pause
            hs.cast_(dst, src)
            with gpu.unordered_stream():
                hs.cast_(dst, src)
            assert_all_same_bits([d.cpu() for d in dst], rounded(src), "there already")
    gpu.synchronize()
    assert_all_same_bits([d.cpu() for d in dst], rounded(src), "there in the end")


class Iteration:
    """Lists and a step together, as one graph captures them."""

    def __init__(self, optimizer: Any, params: list[Any]) -> None:
        self.optimizer, self.params = optimizer, params
        self.copies = [torch.zeros_like(p, dtype=FLOAT32) for p in params]
        self.inverse = torch.full((), 0.5, device=params[0].device)
        self.found = torch.zeros(1, device=params[0].device)

    def __call__(self) -> None:
        hs.unscale_([p.grad for p in self.params], self.inverse, self.found)
        self.optimizer.step()
        hs.cast_(self.copies, self.params)


@pytest.mark.parametrize("options", [{}, {"master": "split", "max_grad_norm": 0.5}], ids=str)
def test_replays_after_eager_calls_with_other_gradients(gpu: Any, options: dict[str, Any]) -> None:
    """Which lie elsewhere: the graph's tables still say where its own lie."""
    weights = parameters(BFLOAT16, gpu.shapes([(7,), (33, 501)]))
    twins = Twins(gpu, BFLOAT16, weights=weights, capturable=True, **options)
    host, there = Iteration(twins.host, twins.host_params), Iteration(twins.there, twins.params)

    def step(t: int, device: Any) -> None:
        twins.backward(t)
        host()
        with gpu.used():
            device()
        twins.assert_same_states()
        assert_all_same_bits([c.cpu() for c in there.copies], host.copies, str(t))

    for t in range(2):
        step(t, there)
    replay = gpu.capture(lambda: there())
    captured = [p.grad for p in twins.params]
    step(2, replay)
    for t in (3, 5):  # eager, then from the graph
        for p in twins.params:
            p.grad = None
        step(t, there)
        for p, grad in zip(twins.params, captured, strict=True):
            p.grad = grad
        step(t + 1, replay)
    assert not there.found.any()


def test_a_captured_lists_table_stays(gpu: Any) -> None:
    """Also when more lists came after it than tables are kept."""
    dst, src = lists(gpu)
    with gpu.used(), quiet():
        hs.cast_(dst, src)
        replay = gpu.capture(lambda: hs.cast_(dst, src))
        for n in range(triton_gpu._TABLES + 2):
            hs.cast_([torch.zeros(n + 1, dtype=BFLOAT16, device=gpu.device)], [torch.ones(n + 1, device=gpu.device)])
        for s in src:
            s.neg_()
        replay()
    gpu.synchronize()
    assert_all_same_bits([d.cpu() for d in dst], rounded(src), "of the replay")


@pytest.mark.real_gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_without_the_call_before_says_so(gpu: Any) -> None:
    """No pinned memory is made in a capture. Once called, the same list can be captured."""
    dst, src = lists(gpu)
    with backend.override(triton_gpu.TritonBackend(gpu.device)):
        with pytest.raises(RuntimeError, match="run the same calls once before the capture"):
            gpu.capture(lambda: hs.cast_(dst, src))
        hs.cast_(dst, src)
        replay = gpu.capture(lambda: hs.cast_(dst, src))
        for d in dst:
            d.zero_()
        replay()
    gpu.synchronize()
    assert_all_same_bits([d.cpu() for d in dst], rounded(src), "of the replay")


# ---- one tensor at a time --------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:halfstep. 1 weights were written by someone else:RuntimeWarning")
@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "not aligned"])
def test_the_functions_on_one_tensor(gpu: Any, first: int) -> None:
    """On every device, whichever is current, they leave what the CPU's kernels leave."""
    from halfstep.triton_kernels import flat  # which imports triton

    (shape,) = gpu.shapes([(20_001,)])
    values, grad = ordinary(shape, FLOAT32, 1)[first:], ordinary(shape, BFLOAT16, 2)[first:]
    for device in [gpu.device, *gpu.others]:
        x, g = moved(ordinary(shape, FLOAT32, 1), device)[first:], moved(ordinary(shape, BFLOAT16, 2), device)[first:]
        assert_same_step(flat, x, g, values, grad)
        half, expected = torch.zeros_like(g), torch.zeros_like(grad)
        flat.cast_(half, x, stochastic=True, seed=7)
        hs.cast_([expected], [values], rounding="stochastic", seed=7)
        total, of_host = flat.sum_of_squares(x), hs.l2_norms([values])[1]
        found = torch.zeros((), device=device)
        flat.unscale_(half, torch.full((), 3e38, device=device), found)
        overflow = torch.zeros(1)
        hs.unscale_([expected], 3e38, overflow)
        got = [half.cpu(), norm_from(total.cpu()), found.cpu()]
        assert_all_same_bits(got, [expected, of_host, overflow.reshape(())], str(device))


def assert_same_step(flat: Any, x: torch.Tensor, g: torch.Tensor, values: torch.Tensor, grad: torch.Tensor) -> None:
    """A bfloat16 weight with a float32 master, one element of which somebody else has written."""
    param = torch.nn.Parameter(values.bfloat16())
    optimizer = hs.AdamW([param], lr=0.1)
    tensors = [x.bfloat16(), g, torch.zeros_like(x), torch.zeros_like(x)]
    master = tensors[0].float()
    for t in (1, 2):
        param.grad = grad.clone()
        healed = flat.adam_(*tensors, t=t, lr=0.1, weight_decay=0.01, master=master)
        optimizer.step()
        assert int(healed) == int(optimizer.healed) == t - 1
        with torch.no_grad():
            for weight in (param, tensors[0]):
                weight[3] = 8.0
    state = optimizer.state[param]
    expected = [param.detach(), state["exp_avg"], state["exp_avg_sq"], state["master"]]
    assert_all_same_bits([t.cpu() for t in (tensors[0], *tensors[2:], master)], expected, "a step")
