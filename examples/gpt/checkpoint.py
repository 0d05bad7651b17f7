"""Checkpoints that a power cut cannot break, and that need no pickle code to load."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .config import Config


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes beside `path`, forces it to the disk, then renames: at every moment `path` is an old or a new whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


def load(path: Path, config: Config) -> dict[str, Any]:
    """The state at `path`; its run must have had the settings of this one ("auto" matmul takes what that run chose)."""
    if not path.exists():
        raise FileNotFoundError(f"expected a checkpoint to resume from at {path}, found none; run without --resume")
    state = torch.load(path, map_location=config.device, weights_only=True)
    ours, theirs = asdict(config), state["config"]
    if ours["matmul"] == "auto":
        ours["matmul"] = theirs["matmul"]
    changed = [f"{key}={theirs.get(key)!r} (now {ours[key]!r})" for key in ours if ours[key] != theirs.get(key)]
    if changed:
        raise ValueError(f"expected the settings {path} was written with: {', '.join(changed)}; or use another --out")
    return state
