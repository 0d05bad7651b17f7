"""`import halfstep`: what it must not pull in, what it may cost, and that it works with pieces missing."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import halfstep

HEAVY = {"triton", "rich", "typer", "click", "transformers", "matplotlib", "pytest", "hypothesis", "pybind11"}
# The requirement: on top of `import torch`, in seconds. CPU time, so that a busy machine does not decide the test.
BUDGET_SECONDS = 0.15
TRIES = 3

# None in sys.modules makes Python treat a module as not installed, for `import` and for find_spec alike.
BLOCK = "import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"


def run(code: str, *options: str) -> str:
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_version_is_the_distribution_s() -> None:
    assert halfstep.__version__ == version("halfstep")


def test_import_is_light() -> None:
    code = "import sys, torch; before = set(sys.modules); import halfstep, json; "
    code += "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    new = set(json.loads(run(code, "-W", "error")))
    assert "halfstep" in new
    assert not new & HEAVY


def test_the_planner_waits_until_it_is_asked_for() -> None:
    code = "import sys, halfstep as hs; first = 'halfstep.planner' in sys.modules; "
    code += "print(first, callable(hs.plan), 'halfstep.planner' in sys.modules, hasattr(hs, 'planet'))"
    assert run(code).split() == ["False", "True", "True", "False"]


def test_import_is_quick() -> None:
    code = "import time, torch; start = time.process_time(); import halfstep; print(time.process_time() - start)"
    assert min(float(run(code)) for _ in range(TRIES)) < BUDGET_SECONDS


def test_every_public_name_exists() -> None:
    assert [name for name in halfstep.__all__ if not hasattr(halfstep, name)] == []


FIRST_STEP = """
import warnings, json, torch, halfstep
from halfstep.ops import backend
p = torch.nn.Parameter(torch.linspace(-1, 1, 1000, dtype=torch.bfloat16))
p.grad = torch.full_like(p, 0.5)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    halfstep.AdamW([p], lr=0.1).step()
print(json.dumps({"weights": p.tolist(), "built": backend.report()["native_cpu"]["built"],
                  "cpu": backend.report()["operators"]["adam_"]["cpu"], "said": [str(w.message) for w in said]}))
"""


@pytest.mark.parametrize("missing", [{"halfstep._cpu"}, {"halfstep._cpu", "triton"}], ids=["no _cpu", "nor triton"])
def test_reference_takes_over_with_the_same_bits(missing: set[str]) -> None:
    whole = json.loads(run(FIRST_STEP))
    bare = json.loads(run(BLOCK.format(blocked=sorted(missing)) + FIRST_STEP))
    assert not bare["built"]
    backend, why = bare["cpu"]
    assert backend == "reference"
    assert "not built" in why
    assert bare["weights"] == whole["weights"]
    (said,) = bare["said"]  # once, in one sentence, at the first use
    assert "not built" in said
    assert "plain PyTorch" in said
    assert whole["said"] == []


def test_a_module_for_another_machine_is_named() -> None:
    """A file that is there but cannot be loaded (other architecture, missing symbol) is not reported as 'not built'."""
    broken = (
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'halfstep._cpu': raise ImportError('wrong ELF class', name=name)\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    bare = json.loads(run(broken + FIRST_STEP))
    assert bare["cpu"][0] == "reference"
    assert "wrong ELF class" in bare["cpu"][1]
