"""The tests of the CUDA kernels again, under the sanitizers: memory beside what is theirs, undefined arithmetic, races.

Each sanitizer has a process of its own, which begins with the sanitizer's library.
What takes long there is left out, except for what no other test runs: more than one table, and kinds of rows.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from emulated_builds import built, sanitized

FILES = {
    "address": ["test_cuda_lists.py", "test_cuda_optimizer.py", "test_cuda_large_tensors.py"],
    "thread": ["test_cuda_lists.py", "test_cuda_optimizer.py"],
}
CHOSEN = (
    "not (not_finite or more_tensors or 1000_small_tensors or awkward)"
    " or (1000_small_tensors and grad_stats) or (1000_small_tensors and cast_)"
    " or (awkward and plain and float16-None) or (awkward and plain and remainder-torch.bfloat16)"
)
FEWEST = 100  # tests; far fewer would mean that CHOSEN has lost what it names


@pytest.mark.parametrize("variant", FILES)
def test_kernels_under(variant, root):
    built(variant)  # here, where a failing compiler is not mistaken for a finding
    tests = [str(root / "tests" / name) for name in FILES[variant]]
    options = ["-v", "--capture=sys", "-p", "no:cacheprovider", "-k", CHOSEN, "--emulated", variant, "--maxfail", "3"]
    command, environment = sanitized(variant, [sys.executable, "-u", "-m", "pytest", *options, *tests])
    ran = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500
    )
    said = f"{' '.join(command)}\n{ran.stdout[-40000:]}"
    assert ran.returncode == 0, said
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None, said
    assert int(passed[1]) >= FEWEST, said
    assert "Sanitizer" not in ran.stdout, said
    assert "runtime error" not in ran.stdout, said
