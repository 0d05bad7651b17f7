#!/usr/bin/env python3
"""Trains a small GPT on the Python standard library's sources, in mixed precision with halfstep.

    python examples/train_gpt.py                                # bfloat16 weights, float32 masters, about 3 minutes
    python examples/train_gpt.py --precision fp16               # float16 and a dynamic loss scale
    python examples/train_gpt.py --optimizer torch              # the same, by hand around torch.optim.AdamW
    python examples/train_gpt.py --attention halfstep           # hs.attention in place of torch's
    python examples/train_gpt.py --preset medium --recompute layer              # a quarter of the activations or less
    python examples/train_gpt.py --accumulate 4 --batch 2       # the same update from four batches
    python examples/train_gpt.py --preset medium --checkpoint-every 100        # interrupted? add --resume

`train_step` is the part to copy. Model, text, optimizer set-up, what is done about activations, checkpoints and report
are in gpt/ beside this file.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from gpt import data, report
from gpt.config import PRESETS, Config, Precision
from gpt.memory import KEEP_ALL, Memory
from gpt.run import Run
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

# Overflows in a row after which the model is to blame: 32 halvings take the highest loss scale to the lowest.
OVERFLOW_LIMIT = 32


def train_step(run: Run, text: data.Text) -> bool:
    """One update from `accumulate` batches; False if a float16 gradient overflowed and there was none."""
    config, history, clock = run.config, run.history, run.clock
    for group in run.optimizer.param_groups:
        group["lr"] = config.learning_rate(history.updates)

    for number in range(config.accumulate):
        batch = text.batch(config.seed, history.batches + number, config.batch, config.context)
        inputs, targets = (tokens.to(run.device) for tokens in batch)
        with clock("forward"):
            loss = run.loss(inputs, targets)
        with clock("backward"):
            run.accumulation.backward(loss, tokens=targets.numel())

    scale = run.scaler.get_scale()
    with clock("optimizer"):
        skipped = run.accumulation.step()  # unscale, clip, update masters and moments, round to the weights
    clock.end_step()

    # Reading the flag waits for the device; only float16, which must retry or drop this batch, has to.
    overflowed = config.scaled and bool(skipped)
    if overflowed:
        history.skipped += 1
        history.overflows += 1
    else:
        history.overflows = 0
        history.updates += 1
        history.losses.append(run.accumulation.loss.item())
    if not overflowed or config.on_overflow == "skip":
        history.batches += config.accumulate
    history.grown += run.scaler.get_scale() > scale
    _raise_if_broken(run)
    return not overflowed


def train(run: Run, text: data.Text, windows: Tensor, console: Console, saved: Path, save_every: int) -> None:
    """Updates until `config.steps` are done, looking at the validation loss eight times on the way."""
    config, history = run.config, run.history
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=config.steps, completed=history.updates)
        while history.updates < config.steps:
            start = time.perf_counter()
            updated = train_step(run, text)
            history.seconds += time.perf_counter() - start
            if not updated:
                continue
            speed = config.tokens_per_step * history.updates / history.seconds
            progress.update(bar, completed=history.updates, description=f"{speed:,.0f} tokens/s")
            if history.updates % max(1, config.steps // 8) == 0 or history.updates == config.steps:
                history.validation.append((history.updates, run.evaluate(text, windows)))
                console.print(_progress_line(run, speed))
            if save_every and history.updates % save_every == 0:
                run.save(saved)


def _raise_if_broken(run: Run) -> None:
    history = run.history
    if history.overflows == OVERFLOW_LIMIT:
        raise RuntimeError(
            f"expected finite gradients, got {history.overflows} overflows in a row after update {history.updates} "
            f"(the loss scale is down to {run.scaler.get_scale():g}); lower --lr, or use --precision bf16"
        )
    if not history.overflows and not math.isfinite(history.losses[-1]):
        raise RuntimeError(f"expected a finite loss, got {history.losses[-1]} at update {history.updates}; lower --lr")


def _progress_line(run: Run, speed: float) -> str:
    history, steps = run.history, run.config.steps
    recent = history.losses[-max(1, steps // 8) :]
    left = (steps - history.updates) * history.seconds / history.updates
    return (
        f"{history.updates:6,} / {steps:,}   training {sum(recent) / len(recent):.3f}   "
        f"validation {history.validation[-1][1]:.3f}   {speed:,.0f} tokens/s   ETA {left // 60:.0f}:{left % 60:02.0f}"
    )


def compare(
    config: Config, steps: int, text: data.Text, windows: Tensor, memory: Memory = KEEP_ALL
) -> dict[str, dict[str, Any]]:
    """The first `steps` updates of a run once more, with halfstep and with torch.optim, turn by turn.

    Same start, same batches, same learning rates. Taking turns shares the machine's moods between the two.
    """
    no_counterpart = config.master == "split" or (config.master == "none" and config.scaled)
    runs = {
        "halfstep": Run(replace(config, optimizer="halfstep"), memory),
        "torch.optim": Run(
            replace(config, optimizer="torch", master="auto" if no_counterpart else config.master), memory
        ),
    }
    while any(run.history.updates < steps for run in runs.values()):
        for run in runs.values():
            if run.history.updates < steps:
                train_step(run, text)
    for run in runs.values():
        run.history.validation.append((steps, run.evaluate(text, windows)))
    return {name: run.result() for name, run in runs.items()}


def main(
    preset: Annotated[Literal["small", "medium", "large"], typer.Option(help="Sizes of model and run.")] = "small",
    precision: Annotated[Precision, typer.Option(help="16-bit weights, or float32 ones under autocast.")] = "bf16",
    optimizer: Annotated[Literal["halfstep", "torch"], typer.Option(help="Who does the optimizer phase.")] = "halfstep",
    master: Annotated[Literal["auto", "fp32", "split", "none"], typer.Option(help="Behind 16-bit weights.")] = "auto",
    steps: Annotated[int | None, typer.Option(min=1, help="Updates; default as preset.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Blocks in a batch; default as preset.")] = None,
    context: Annotated[int | None, typer.Option(min=2, help="Bytes in a block; default as preset.")] = None,
    accumulate: Annotated[int | None, typer.Option(min=1, help="Batches to an update; default as preset.")] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Highest learning rate; default as preset.")] = None,
    warmup: Annotated[int | None, typer.Option(min=0, help="Updates up to it; default as preset.")] = None,
    clip: Annotated[float, typer.Option(min=0, help="Largest gradient norm; 0: no limit.")] = Config.clip,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and of the text's order.")] = Config.seed,
    on_overflow: Annotated[Literal["retry", "skip"], typer.Option(help="What fp16 does with the batch.")] = "retry",
    init_scale: Annotated[float, typer.Option(min=1, help="First loss scale of fp16.")] = Config.init_scale,
    growth_interval: Annotated[int, typer.Option(min=1, help="Updates before it grows.")] = Config.growth_interval,
    matmul: Annotated[Literal["auto", "native", "upcast"], typer.Option(help="16-bit products.")] = "auto",
    attention: Annotated[Literal["halfstep", "sdpa"], typer.Option(help="Whose: hs.attention, or torch's.")] = "sdpa",
    recompute: Annotated[str, typer.Option(help="none, layer, selective, or bytes the blocks keep: 3MB.")] = "none",
    offload_activations: Annotated[bool, typer.Option("--offload-activations", help="To the host's memory.")] = False,
    device: Annotated[str, typer.Option(help="As torch names it; auto: cuda if there is one.")] = "auto",
    validation: Annotated[int, typer.Option(min=1, help="Bytes of validation text to look at.")] = 32_768,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the checkpoint.")] = Path("runs/gpt"),
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Updates between checkpoints; 0: at the end.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in OUT.")] = False,
    compare_steps: Annotated[int, typer.Option(min=0, help="Updates beside torch.optim at the end; 0: none.")] = 40,
    json: Annotated[Path | None, typer.Option(help="Where to write the metrics, one JSON object.")] = None,
) -> None:
    """Trains a small GPT on the Python standard library's sources, in mixed precision with halfstep."""
    given = dict(steps=steps, batch=batch, context=context, accumulate=accumulate, lr=lr, warmup=warmup)
    sizes: dict[str, Any] = PRESETS[preset] | {name: value for name, value in given.items() if value is not None}
    try:
        config = Config(
            **sizes,
            precision=precision,
            optimizer=optimizer,
            master=master,
            clip=clip,
            seed=seed,
            on_overflow=on_overflow,
            init_scale=init_scale,
            growth_interval=growth_interval,
            matmul=matmul,
            attention=attention,
            device=("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device,
        )
        memory = Memory(recompute, offload_activations)
        saved = out / "checkpoint.pt"
        run = Run.resume(saved, config, memory) if resume else Run(config, memory)
    except (FileNotFoundError, ValueError) as error:  # the user's to mend, in one line
        raise typer.BadParameter(str(error)) from error
    console = Console()
    text = data.load()
    windows = text.validation_windows(max(1, validation // config.context), config.context)
    baselines = data.ngram_nats(text, windows[:, 1:])
    console.print(f"text       {text.source}", soft_wrap=True)
    console.print(f"to beat    bigram {baselines['bigram']:.3f}, trigram {baselines['trigram']:.3f} nats per byte")
    console.print(f"model      {run.parameters:,} parameters, {precision} on {config.device}, {optimizer}")
    console.print(f"matmul     {run.matmul.kind}: {run.matmul.reason}", soft_wrap=True)
    whose = {"halfstep": "hs.attention", "sdpa": "torch's scaled_dot_product_attention"}[run.matmul.attends]
    console.print(f"attention  {whose}", soft_wrap=True)
    try:
        activations = run.measure_activations(text)
    except ValueError as error:  # a budget below the least
        raise typer.BadParameter(str(error)) from error
    console.print(f"activations  {activations}; recomputed: {memory.recompute}", soft_wrap=True)
    if offload_activations:
        console.print(f"offload    {run.around_forward}", soft_wrap=True)

    train(run, text, windows, console, saved, checkpoint_every)
    run.save(saved)
    results = {"this run": run.result()}
    if compare_steps:
        results |= compare(run.config, min(compare_steps, config.steps), text, windows, memory)
    console.print(report.table(results))
    if json:
        report.write_json(json, report.metrics(run, results, baselines))
    try:
        report.picture(out / "loss.png", run.history.losses, run.history.validation, baselines)
        console.print(f"loss curves in {out / 'loss.png'}", soft_wrap=True)
    except ImportError:
        console.print("no picture of the loss curves: it needs matplotlib (pip install matplotlib)")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
