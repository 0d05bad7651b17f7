"""The import direction, and the alarms that keep files readable.

Guards: a user-level module that calls a kernel past `ops/` (then the backend choice, the device guard and the override
hook are skipped without anyone noticing), import cycles, torch headers in the torch-free core.
"""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "halfstep"

# Top to bottom: a unit may import units of its own row and of later ones, without cycles. A new file goes into a row.
LAYERS = [
    ["__main__"],
    ["cli", "bench"],
    ["doctor", "integrations", "planner"],
    ["accumulate", "activations", "batch_norm"],
    [
        "gradient_sums",
        "gradient_sync",
        "fsdp2_state",
        "loss_graph",
        "token_weights",
        "window_stage",
        "window_statistics",
    ],
    ["attention_tuning"],
    ["optim", "scaler", "attention", "nn", "cast", "gradients"],
    ["fused_adam"],
    [
        "step_table",
        "compiled_step",
        "checkpoints",
        "states",
        "state_map",
        "hyper",
        "attention_inputs",
        "reports",
        "loss_scale",
    ],
    ["shards", "host_states", "transfers", "outcomes", "wrappers", "untraced"],
    ["ops"],
    ["reference", "triton_kernels", "_cpu", "_cuda", "_cuda_emulated"],
    ["_version"],
]
ROW = {unit: row for row, units in enumerate(LAYERS) for unit in units}
KERNELS = ROW["reference"]
LONGEST_FILE = 400


class WithoutTypingImports(ast.NodeTransformer):
    """Drops `if TYPE_CHECKING:` blocks: a name in an annotation is not a dependency at run time."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node.orelse
        self.generic_visit(node)
        return node


def units_imported_by(source: str, module: str) -> set[str]:
    """Units of halfstep that a module imports when it runs, at any depth; `module` is its dotted name."""
    found = set()
    for node in ast.walk(WithoutTypingImports().visit(ast.parse(source))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{start}.{alias.name}" for alias in node.names] if start == "halfstep" else [start]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "halfstep":
                found.add(parts[1] if len(parts) > 1 else "halfstep")
    return found


def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything in the package; links (triton_kernels, bench) are followed."""
    files = [*PACKAGE.glob("*.py")]
    for folder in (path for path in PACKAGE.iterdir() if path.is_dir()):
        files += folder.rglob("*.py")
    # A package's __init__ is named with it, so that `from .` counts its levels from the right place.
    return {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in files}


def unit_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[1] != "__init__" else "halfstep"


def violations(module: str, source: str) -> list[str]:
    unit = unit_of(module)
    if unit == "halfstep":  # __init__.py re-exports from everywhere
        return []
    result = []
    if unit not in ROW:
        return [f"{module}: unit {unit!r} is in no layer; put it into LAYERS"]
    for other in sorted(units_imported_by(source, module) - {unit}):
        if other == "halfstep" or other not in ROW:
            # `import halfstep` / `from halfstep import AdamW`: everything at once, so only from the top.
            if unit not in ("bench", "cli", "doctor"):
                result.append(f"{module}: imports halfstep.{other}, which is in no layer, or the package itself")
        elif ROW[other] < ROW[unit]:
            result.append(f"{module}: imports {other}, which is above {unit}")
        elif ROW[other] == KERNELS and unit not in ("ops", "bench"):
            result.append(f"{module}: reaches {other} past ops")
        elif unit == "triton_kernels":
            result.append(f"{module}: triton_kernels imports nothing of halfstep, found {other}")
    return result


def test_imports_point_downwards() -> None:
    found = [text for module, path in modules().items() for text in violations(module, path.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_imports_make_no_circle() -> None:
    below: dict[str, set[str]] = {}
    for module, path in modules().items():
        if unit_of(module) != "halfstep":
            others = units_imported_by(path.read_text("utf-8"), module) - {unit_of(module), "halfstep"}
            below.setdefault(unit_of(module), set()).update(others)
    TopologicalSorter(below).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("halfstep.optim", "from halfstep.reference import optimizer", "past ops"),
        ("halfstep.optim", "from halfstep import _cpu", "past ops"),
        ("halfstep.ops.cast", "from halfstep.optim import AdamW", "above"),
        ("halfstep.ops.cast", "def f():\n    from ..scaler import LossScaler", "above"),
        ("halfstep.reference.cast", "from halfstep import _cpu", "past ops"),
        ("halfstep.optim", "from halfstep import accumulate", "above"),
        ("halfstep.ops.cast", "import halfstep", "the package itself"),
        ("halfstep.triton_kernels.cast", "from halfstep._version import __version__", "imports nothing"),
        ("halfstep.tensor_facts", "", "in no layer"),
    ],
)
def test_wrong_imports_are_seen(module: str, source: str, complaint: str) -> None:
    assert complaint in "".join(violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("halfstep.optim", "from halfstep.ops import optimizer\nfrom .ops.cast import cast_"),
        ("halfstep.ops.cast", "from . import layout\nfrom ..reference import cast\nfrom halfstep import _cpu"),
        ("halfstep.ops.__init__", "from . import cast\nfrom .layout import facts"),
        ("halfstep.shards", "if TYPE_CHECKING:\n    from .optim import AdamW"),
    ],
)
def test_right_imports_pass(module: str, source: str) -> None:
    assert violations(module, source) == []


def sources(*suffixes: str) -> list[Path]:
    folders = ["csrc", "triton_kernels", "python", "bench", "tests", "examples"]
    files = [ROOT / "setup.py"]
    files += [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [path for path in files if path.suffix in suffixes and path.is_file()]


def test_the_core_includes_no_torch() -> None:
    native = sources(".h", ".cpp", ".cu", ".cuh")
    assert native
    torch_header = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|caffe2)/')
    assert [path for path in native if torch_header.search(path.read_text("utf-8"))] == []
    python_header = re.compile(r'#\s*include\s*[<"](pybind11/|Python\.h)')
    bound = {path.parent.name for path in native if python_header.search(path.read_text("utf-8"))}
    assert bound == {"module"}, "only the module/ folders know Python: kernels compile for targets that have none"


def test_files_stay_readable() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in sources(".py", ".h", ".cpp", ".cu", ".cuh")}
    too_long = [f"{path.relative_to(ROOT)}: {n} lines" for path, n in lengths.items() if n > LONGEST_FILE]
    assert not too_long, f"longer than {LONGEST_FILE} lines, split along what they do: {too_long}"
