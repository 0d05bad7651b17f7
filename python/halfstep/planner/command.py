"""`halfstep plan`: options to fields, the plan to the terminal, to JSON, to a page, to a script."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .degrees import check_degrees
from .hardware import DEFAULT_PRESET, hardware
from .hardware import PRESETS as HARDWARE
from .inverse import LARGEST, LONGEST, SCALES, largest_model, longest_sequence
from .job import ATTENTIONS, PRECISIONS
from .model import ModelShape
from .planning import OFFLOADS, choices, plan, sequence_of, shape_of, wish_of
from .quantities import parse_number
from .result import Plan
from .search import Space
from .time import Assumptions

BAD_INPUT = 2  # exit code


def _option(flag: str, text: str) -> Any:
    # Texts, even where numbers are meant: what is wrong with them is said in one line, the same as from Python.
    return typer.Option(flag, help=text, show_default=False)


def command(
    model: Annotated[
        str, typer.Argument(help="A preset (llama-7b, gpt2 ...) or the path of a transformers config.json.")
    ],
    gpu: Annotated[
        str, _option("--gpu", f"Kind of GPU: {', '.join(HARDWARE)} (default {DEFAULT_PRESET}).")
    ] = DEFAULT_PRESET,
    gpus: Annotated[str | None, _option("--gpus", "How many.")] = None,
    gpu_memory: Annotated[str | None, _option("--gpu-memory", "Of each: 80GB, 80GiB, 640G.")] = None,
    gpus_per_node: Annotated[str | None, _option("--gpus-per-node", "Default 8.")] = None,
    host_memory: Annotated[str | None, _option("--host-memory", "RAM of a node: 2TB.")] = None,
    in_node: Annotated[str | None, _option("--in-node", "A GPU's link to others of its node: 450GB/s.")] = None,
    between_nodes: Annotated[str | None, _option("--between-nodes", "A GPU's link to other nodes: 400Gb/s.")] = None,
    host_link: Annotated[str | None, _option("--host-link", "A GPU's link to RAM: 64GB/s.")] = None,
    sequence: Annotated[
        str | None, _option("--seq", "Tokens of a sequence (default 2048, or fewer positions).")
    ] = None,
    global_batch: Annotated[str | None, _option("--global-batch", "Of one step: 1M-tokens, 512-sequences.")] = None,
    micro_batch: Annotated[str | None, _option("--micro-batch", "Sequences at a time on one GPU.")] = None,
    precision: Annotated[str, _option("--precision", f"{', '.join(PRECISIONS)} (default bf16).")] = "bf16",
    attention: Annotated[str, _option("--attention", f"{', '.join(ATTENTIONS)} (default fused).")] = "fused",
    optimizer: Annotated[str | None, _option("--optimizer", "Mode of masters and states: master, split ...")] = None,
    recompute: Annotated[str | None, _option("--recompute", ", ".join(Space.recomputes))] = None,
    zero: Annotated[str | None, _option("--zero", "Stage, 0 to 3.")] = None,
    tensor_parallel: Annotated[str | None, _option("--tensor-parallel", "GPUs that a layer is split over.")] = None,
    pipeline_parallel: Annotated[str | None, _option("--pipeline-parallel", "Stages of layers.")] = None,
    offload: Annotated[str | None, _option("--offload", ", ".join(OFFLOADS))] = None,
    learning_rate: Annotated[str | None, _option("--lr", "Learning rate of another run, for advice.")] = None,
    learning_rate_batch: Annotated[str | None, _option("--lr-batch", "That run's global batch.")] = None,
    assume: Annotated[
        list[str] | None, _option("--assume", "Constant of the time model: matmul_efficiency=0.4.")
    ] = None,
    largest: Annotated[str | None, _option("--largest", f"The largest model by {', '.join(SCALES)}, instead.")] = None,
    longest: Annotated[bool, typer.Option("--longest", help="The longest sequence, instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as one JSON object.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with charts, for a browser.")] = None,
    script: Annotated[
        str | None, typer.Option("--script", help="Write a training script to edit; - prints it.")
    ] = None,
) -> None:
    """Show what trains on which hardware, its memory by part, the cheapest way, and what to change if nothing fits.

    Runs nothing and needs no GPU. Other models than presets and configuration files are planned from Python:
    hs.plan(MeasuredModel(...)). Example: halfstep plan llama-7b --gpus 8 --gpu-memory 80GB --global-batch 1M-tokens
    """
    given = locals()
    try:
        on = hardware(gpu, **{name: _whole(name, given[name], WHOLE_HARDWARE) for name in HARDWARE_OPTIONS})
        choice = {name: _whole(name, given[name], WHOLE_CHOICES) for name in CHOICE_OPTIONS}
        wish = {
            "sequence": None if sequence is None else parse_number(sequence, "sequence"),
            "precision": precision,
            "attention": attention,
        }
        if largest is not None or longest:
            _check_alone(given)
            _inverse(model, on, wish, choice, largest)
            return
        found = plan(
            model, on, **wish, **choice, global_batch=global_batch, assumptions=_assumptions(assume or []),
            learning_rate=None if learning_rate is None else parse_number(learning_rate, "learning_rate", whole=False),
            learning_rate_batch=learning_rate_batch,
        )  # fmt: skip
        _show(found, as_json, html, script)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"halfstep plan: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None


HARDWARE_OPTIONS = ("gpus", "gpu_memory", "gpus_per_node", "host_memory", "in_node", "between_nodes", "host_link")
WHOLE_HARDWARE = {"gpus", "gpus_per_node"}
CHOICE_OPTIONS = ("micro_batch", "optimizer", "recompute", "zero", "tensor_parallel", "pipeline_parallel", "offload")
WHOLE_CHOICES = {"micro_batch", "zero", "tensor_parallel", "pipeline_parallel"}


def _whole(name: str, text: str | None, whole: set[str]) -> Any:
    return parse_number(text, name) if text is not None and name in whole else text


def _assumptions(pairs: list[str]) -> Assumptions:
    names = {field.name for field in fields(Assumptions)}
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if name not in names or not separator:
            raise ValueError(f"assume={pair!r}: expected name=value with one of {', '.join(sorted(names))}")
        changes[name] = _truth(name, value) if name == "causal" else parse_number(value, name, whole=False)
    return Assumptions(**changes)


INVERSE = ("largest", "longest")
NOT_OF_INVERSE = ("as_json", "html", "script", "global_batch", "micro_batch", "learning_rate", "learning_rate_batch",
                  "assume")  # fmt: skip


def _check_alone(given: dict[str, Any]) -> None:
    """The other way round is answered in one line; what it would not look at is refused."""
    asked = [name for name in INVERSE if given[name]]
    refused = [*asked[1:], *(name for name in NOT_OF_INVERSE if given[name])]
    if refused:
        name = refused[0]
        value = str(given[name]) if isinstance(given[name], Path) else given[name]
        raise ValueError(
            f"{name.removeprefix('as_')}={value!r}: expected none with --{asked[0]}, which is answered in one line; "
            "plan what it finds"
        )


def _inverse(model: str, on: Any, wish: dict[str, Any], choice: dict[str, Any], scale: str | None) -> None:
    spaces, shape = choices(wish["precision"], **choice), shape_of(model)
    wished = wish_of(**{**wish, "sequence": sequence_of(shape, wish["sequence"])})
    if scale is None:
        check_degrees(shape, on, choice["tensor_parallel"], choice["pipeline_parallel"])
        tokens = longest_sequence(shape, on, wished, spaces)
        least = "at least " if tokens == LONGEST else ""
        print(f"longest sequence of {shape.name}: {least}{f'{tokens:,}' if tokens else 'less than 128'} tokens")
        return
    found = largest_model(shape, on, wished, spaces, scale)
    least = "at least " if isinstance(shape, ModelShape) and found == SCALES[scale](shape, LARGEST) else ""
    print(f"largest by {scale}: {least}" + (f"{found.name}, {found.parameters:,} parameters" if found else "none fits"))


def _show(found: Plan, as_json: bool, html: Path | None, script: str | None) -> None:
    """Files first: where one cannot be written, nothing is printed but that."""
    text = None if script is None else found.script()
    if html is not None:
        from .report import page

        _write("html", html, page(found))
    if text is not None and script is not None and script != "-":
        _write("script", Path(script), text)
    if script == "-":
        print(text, end="")
    elif as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        Console(highlight=False).print(found)


def _write(name: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{name}={str(path)!r}: expected a path to write to, {error.strerror}") from None


def _truth(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{name}={text!r}: expected true or false")
    return text.lower() == "true"
