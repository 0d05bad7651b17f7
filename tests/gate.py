"""`make gate`: compiles everything that can be compiled here, for every target, warnings as errors.

The host's instruction sets always; NEON when the cross compiler is installed, the CUDA kernels for every architecture
when nvcc is, the Triton kernels likewise when Triton is (some minutes, the first time). Exits with 1
if something does not compile or holds what it may not (tests/kernel_objects.py, tests/compiled/rules.py, amd_rules.py,
attention_rules.py); a missing compiler is said, not failed. Lowers the kernels' budgets to what they need and writes
docs/kernels.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from compiled import cuda_gate
from kernel_objects import complaints

ROOT = Path(__file__).resolve().parent.parent
ARM = "aarch64-linux-gnu-"


def compile_kernels(name: str, *options: str) -> tuple[Path, str]:
    """Build folder and the compiler's output; the output is empty if all is well."""
    build = ROOT / "build" / f"gate-{name}"
    shutil.rmtree(build, ignore_errors=True)
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DHALFSTEP_KERNELS_ONLY=ON", *options]
    configure.append("-DCMAKE_COMPILE_WARNING_AS_ERROR=ON")
    # cmake and ninja are .venv's, and .venv need not be activated
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for command in (configure, ["cmake", "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
        if done.returncode:
            return build, done.stdout + done.stderr
    return build, ""


def check(name: str, prefix: str, *options: str) -> bool:
    """Compile one target and look into its objects; prints a line per instruction set."""
    build, output = compile_kernels(name, *options)
    if output:
        print(f"{name}: does not compile\n{output}")
        return False
    facts = json.loads((build / "build_facts.json").read_text(encoding="utf-8"))
    good = True
    for isa in facts["isas"]:
        wrong = complaints(build / "CMakeFiles" / f"kernels_{isa}.dir", isa, prefix)
        print(f"{name:8} {isa:9} {facts['compiler']:12} {'ok' if not wrong else 'WRONG'}", *wrong, sep="\n    ")
        good = good and not wrong
    return good


def main() -> int:
    good = check(platform.machine(), "")
    native_arm = platform.machine() == "aarch64"  # then NEON was the host's turn
    if not native_arm and shutil.which(f"{ARM}g++"):
        options = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={ARM}g++")
        good = check("aarch64", ARM, *options) and good
    elif not native_arm:
        print("aarch64  neon      not checked: no cross compiler (Debian, Ubuntu: apt install g++-aarch64-linux-gnu)")
    good = cuda_gate.check() and good
    if importlib.util.find_spec("triton"):
        from compiled import attention_gate, triton_gate

        good = triton_gate.check() and good
        good = attention_gate.check() and good
    else:
        print("Triton   -         not checked: Triton is not installed (pip install triton)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
