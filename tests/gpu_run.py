"""`make gpu`: each backend's tests, then the benches; each part in its own time, none stops those after it.

    python tests/gpu_run.py FOLDER     rows of the benches and log.txt go to FOLDER

Prints a short table of all parts and of the benches' headlines last; the exit status is 1 if any part failed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import gpu_state
import torch

from halfstep.ops import backend, triton_gpu

TESTS = [
    sys.executable, "-m", "pytest", "tests/gpu", "--override-ini=addopts=-ra", "-p", "no:cacheprovider", "-q",
    "--backend",
]  # fmt: skip
SANITIZED = "test_accumulate or test_statistics or (test_steps and AdamW and (split or master))"
_REFUSED = "Device not supported"  # by compute-sanitizer, on some virtual machines
# Triton compiles most kernels at the first run, and a process compiles one at a time
WORKERS = ["-n", "auto", "--maxprocesses=8", "--dist", "loadgroup", "--max-worker-restart=0"]
BUDGET = 480  # seconds for all parts, so that with a build before them it can be under ten minutes
# What of tests/gpu is about attention, and of its bench is run: the kernels of each are many to compile
ATTENTION, ATTENTION_CASES = "gpu_attention", "length 16,384"


class Part(NamedTuple):
    name: str
    command: list[str]
    seconds: int  # it is ended after that


class Outcome(NamedTuple):
    part: Part
    result: str  # "passed", "not possible: ..." or what went wrong
    seconds: float

    @property
    def failed(self) -> bool:
        return self.result != "passed" and not self.result.startswith("not possible")


def parts(folder: Path) -> tuple[list[Part], list[str]]:
    """What is run, in order; and what is left out, and why."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    chosen, left_out = [], []
    backends = [("native", 70, ("memcheck", "racecheck", "initcheck")), ("triton", 70, ("memcheck",))]
    checks: list[Part] = []
    for name, seconds, wanted in backends:
        if reason := why_not(name):
            left_out.append(f"the tests of the backend {name!r} were not run: {reason}")
            continue
        options = [name, "--durations=10", *WORKERS, "-k"]
        chosen.append(Part(f"tests, {name}", [*TESTS, *options, f"not {ATTENTION}"], seconds))
        if name == "triton":
            chosen.append(Part("tests, attention", [*TESTS, *options, ATTENTION], 120))
        checks += [_sanitized(tool, check, name) for check in wanted if tool]
    if tool is None:
        left_out.append("compute-sanitizer is not on the PATH: memcheck, racecheck and initcheck were not run")
    chosen += checks
    cases = {"attention": (75, ["--rounds", "3", "--only", ATTENTION_CASES]), "optimizer": (60, ["--rounds", "5"])}
    cases |= {"cast": (35, ["--rounds", "5"]), "activations": (30, ["--rounds", "3", "--only", "4 x 2048"])}
    for bench, (seconds, options) in cases.items():
        command = [sys.executable, "-m", "halfstep", "bench", bench, "--device", "cuda", "--out", str(folder)]
        chosen.append(Part(f"bench {bench}", [*command, *options], seconds))
    return chosen, left_out


def why_not(name: str) -> str | None:
    """Why a backend's kernels do not run on the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    return backend._native_for(device)[1] if name == "native" else triton_gpu.why_not(device)


def _sanitized(tool: str, check: str, name: str) -> Part:
    # Memory that torch keeps for itself would hide what is read beyond a tensor, or before it is written.
    watched = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", tool, "--tool", check, "--error-exitcode", "9"]
    if check != "initcheck":  # which has to see what torch's kernels write
        watched += [
            "--kernel-regex",
            "kns=halfstep" if name == "native" else "kns=_kernel",
        ]  # Triton's have no namespace
    return Part(f"{check}, {name}", [*watched, *TESTS, name, "-x", "-k", SANITIZED], 30)


def run(chosen: Sequence[Part], log: Path, budget: float = BUDGET) -> list[Outcome]:
    """Each part's output goes to the terminal and to the log."""
    begun, outcomes = time.monotonic(), []
    for part in chosen:
        start = time.monotonic()
        left = min(float(part.seconds), budget - (start - begun))
        result = _run(part, left, log) if left > 5 else "not run: no time was left"
        outcomes.append(Outcome(part, result, time.monotonic() - start))
    return outcomes


def _run(part: Part, seconds: float, log: Path) -> str:
    heading = f"\n==== {part.name}: {' '.join(part.command)}\n"
    with log.open("a", encoding="utf-8") as file:
        file.write(heading)
        print(heading, flush=True)
        limited = ["timeout", "--kill-after=5", str(round(seconds)), *part.command]
        refused = False
        with subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
            for line in child.stdout or ():
                refused = refused or _REFUSED in line
                print(line, end="", flush=True)
                file.write(line)
                file.flush()
        status = child.returncode
    if refused:
        return f"not possible: {Path(part.command[2]).name} says {_REFUSED!r}"
    if status in (124, 137):
        return f"ended after {seconds:.0f} s"
    return "passed" if status == 0 else f"failed with status {status}"


def headlines(folder: Path) -> list[str]:
    """halfstep's rows of this folder's newest runs: time, share of a copy, against torch; who is missing."""
    lines = []
    for path in sorted(folder.glob("*-gpu.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        ours = [r for r in rows if r["run"] == rows[-1]["run"] and r["provider"].startswith("halfstep")]
        skipped = {row["provider"]: row["skipped"] for row in ours if row["skipped"]}
        lines += [f"{path.stem}: {provider} was skipped: {reason}" for provider, reason in skipped.items()]
        for row in ours:
            if not row["skipped"]:
                share = "" if row["of_probe"] is None else f"{row['of_probe']:.0%} of copy"
                if row.get("tflops"):
                    share = f"{row['tflops']:.0f} TFLOP/s"
                speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}x"
                name = f"{row['what']}: {row['provider'].removeprefix('halfstep').removeprefix(', ')}".removesuffix(
                    ": "
                )
                lines.append(
                    f"{row['case'][:28]:28} {name[:34]:34} {row['median_ms']:9.3f} ms {share:>12} {speedup:>7} "
                    f"host {row['host_us']:6.0f} us {row['launches']:3} kernels"
                )
    return lines


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0])
    if gpu_state.main():
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    chosen, left_out = parts(folder)
    outcomes = run(chosen, folder / "log.txt")
    summary = ["", *headlines(folder), ""]
    summary += [f"{o.part.name:20} {o.seconds:5.0f} s  {o.result}" for o in outcomes]
    summary += left_out
    print("\n".join(summary))
    with (folder / "log.txt").open("a", encoding="utf-8") as file:
        file.write("\n".join(summary) + "\n")
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
