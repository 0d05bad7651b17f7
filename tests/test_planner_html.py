"""The page of a plan: one file that asks for nothing, opened in a browser, readable without colours."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colors, image
from typer.testing import CliRunner

import halfstep as hs
from halfstep import cli
from halfstep.planner import MODELS, Plan
from halfstep.planner.charts import COLOURS, PATTERNS, _look, _place
from halfstep.planner.report import page
from halfstep.planner.result import PART_ORDER

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
VOID = {"meta"}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {
        "fits": hs.plan("llama-7b", "h100", global_batch=512, learning_rate=3e-4, learning_rate_batch=256),
        "nothing": hs.plan("llama-70b", "a100-80gb", global_batch=900, offload="none", optimizer="master"),
    }


@pytest.fixture(scope="module")
def pages(plans: dict[str, Plan]) -> dict[str, str]:
    return {name: page(plan) for name, plan in plans.items()}


class Reader(HTMLParser):
    """Tags that are open, texts, ids and what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("name", ["fits", "nothing"])
def test_it_stands_for_itself(pages: dict[str, str], name: str) -> None:
    text = pages[name]
    reader = Reader(text)
    assert not reader.open, "every tag is closed"
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in reader.attributes
    addresses = [value for key, value in reader.attributes if key in ("src", "href", "action", "data", "srcset")]
    assert addresses == []
    links = [value for key, value in reader.attributes if key == "xlink:href"]
    assert all(value is not None and value.startswith("#") for value in links)
    assert not re.search(r"url\((?!#)|@import|<script|<link|<iframe", text)
    assert len(text) < 150_000


@pytest.mark.parametrize("name", ["fits", "nothing"])
def test_ids_are_unique_and_found(pages: dict[str, str], name: str) -> None:
    reader = Reader(pages[name])
    ids = [value for key, value in reader.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', pages[name]))
    assert used
    assert used <= set(ids)


@pytest.mark.parametrize("name", ["fits", "nothing"])
def test_everything_that_was_planned_is_on_it(plans: dict[str, Plan], pages: dict[str, str], name: str) -> None:
    plan, text = plans[name], " ".join(Reader(pages[name]).texts)
    assert ("does not fit" in text) == (not plan.fits)
    for part, size in plan.memory.phases["backward"].items():
        assert part.replace("_", " ") in text
        assert f"{size / 1e9:,.2f}" in text
    for words in (*plan.settings.values(), *plan.advice, *(each.change for each in (*plan.levers, *plan.remedies))):
        assert words in text
    if plan.learning_rate is not None:
        assert str(plan.learning_rate) in text
    for name_of_constant in ("matmul_efficiency = 0.5", "link_efficiency = 0.8"):
        assert name_of_constant in text


def test_charts_are_described_and_their_text_is_text(plans: dict[str, Plan], pages: dict[str, str]) -> None:
    memory, time = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", pages["fits"], re.DOTALL)]
    namespace = "{http://www.w3.org/2000/svg}"
    for svg in (memory, time):
        assert svg.get("role") == "img"
        assert svg.get("width") is None, "as wide as the page"
        assert svg.get("viewBox")
    described = memory.findtext(f"{namespace}desc") or ""
    for phase in plans["fits"].memory.phases:
        assert re.search(rf"{phase} [\d.]+ [GM]B", described)
    texts = {"".join(text.itertext()).strip() for text in memory.iter(f"{namespace}text")}
    assert {"forward", "loss", "backward", "reduce", "step", "GB on one GPU"} <= texts
    part, size = max(plans["fits"].memory.phases["backward"].items(), key=lambda each: each[1])
    assert any(text.endswith(f"{size / 1e9:.1f}") for text in texts), f"the largest piece, {part}, carries its number"
    assert any(re.fullmatch(r"[a-z]+ [\d.]+", text) for text in texts), "and a name that is short stands beside it"
    assert any("compute" in "".join(text.itertext()) for text in time.iter(f"{namespace}text"))


def test_parts_differ_without_colours_too(plans: dict[str, Plan]) -> None:
    looks = [_look(_place(part)) for part in PART_ORDER]
    assert len({look["hatch"] for look in looks}) == len(PART_ORDER) <= len(PATTERNS)
    assert all(one["color"] != other["color"] for one, other in pairwise(looks))
    for plan in plans.values():
        assert set(plan.memory.parts) <= set(PART_ORDER)


def test_what_a_model_is_called_is_text() -> None:
    model = replace(MODELS["gpt2"], name='<img src="http://x/"> & "friends"')
    reader = Reader(page(hs.plan(model, "h100")))
    assert not [value for key, value in reader.attributes if key == "src"]
    assert any('<img src="http://x/"> & "friends"' in text for text in reader.texts)


# ---- in a browser ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no browser: apt-get install chromium-headless-shell (Debian)")
    return found


def opened(browser: str, address: str, folder: Path) -> tuple[Path, str]:
    """(screenshot, log of what was asked for over the network)."""
    shot, log = folder / "page.png", folder / "net.json"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
    ]
    command = [browser, *options, f"--log-net-log={log}", f"--screenshot={shot}", "--window-size=1100,1400", address]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return shot, log.read_text(encoding="utf-8")


def test_a_browser_draws_the_bars(browser: str, plans: dict[str, Plan], pages: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(pages["fits"], encoding="utf-8")
    shot, log = opened(browser, path.as_uri(), tmp_path)
    events = json.loads(log)
    kinds = {number: name for name, number in events["constants"]["logSourceType"].items()}
    assert "URL_REQUEST" not in {kinds[event["source"]["type"]] for event in events["events"]}
    pixels = image.imread(shot)[..., :3]
    memory = plans["fits"].memory
    large = [part for part, size in memory.parts.items() if size > 0.05 * memory.peak]
    assert large
    for part in large:  # less than half of a piece is covered by its pattern and its name
        colour = np.array(colors.to_rgb(_look(_place(part))["color"]))
        seen = (np.abs(pixels - colour).max(axis=2) < 0.02).sum()
        assert seen > 500, part


def test_a_request_would_be_seen(browser: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text('<img src="http://127.0.0.1:9/x.png">', encoding="utf-8")
    events = json.loads(opened(browser, path.as_uri(), tmp_path)[1])
    kinds = {number: name for name, number in events["constants"]["logSourceType"].items()}
    assert "URL_REQUEST" in {kinds[event["source"]["type"]] for event in events["events"]}


# ---- from the command ------------------------------------------------------------------------------------------------
def test_the_command_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    result = CliRunner().invoke(cli.app, ["plan", "gpt2", "--html", str(path)])
    assert result.exit_code == 0, result.output
    assert path.read_text(encoding="utf-8") == page(hs.plan("gpt2"))
    result = CliRunner().invoke(cli.app, ["plan", "gpt2", "--html", str(tmp_path / "none" / "report.html")])
    assert result.exit_code == 2
    assert result.stderr.startswith("halfstep plan: ")
    assert result.stderr.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(cli.app, ["plan", "gpt2", "--html", "never.html"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(
        r"halfstep plan: the page's charts need matplotlib \(.*\): pip install 'halfstep\[plan\]'\n", result.stderr
    )


def test_colours_are_the_ones_that_were_chosen_for_all_eyes() -> None:
    """Each two differ in lightness or are far apart; catches a colour that was replaced by a similar one."""
    rgb = [np.array(colors.to_rgb(colour)) for colour in COLOURS]
    assert min(np.abs(one - other).max() for i, one in enumerate(rgb) for other in rgb[:i]) > 0.15
