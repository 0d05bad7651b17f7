"""Hardware for plans: units as people write them, ranges, presets. Each message is matched."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from halfstep.planner.hardware import PRESETS, RANGES, Hardware, hardware
from halfstep.planner.quantities import parse_bytes, parse_flops, parse_global_batch, parse_rate, shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GB", 80 * 10**9), ("80gb", 80 * 10**9), ("80 GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("640G", 640 * 10**9),
        ("640Gi", 640 * 2**30), ("3KiB", 3072),
        ("1.5TB", 1_500_000_000_000), ("2e3MB", 2 * 10**9), ("1_000kB", 10**6), ("512B", 512),
        ("7", 7), (123, 123),
    ],
)  # fmt: skip
def test_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["80 bananas", "GB", "", "80GBB", "80 GB GB", "1e999GB", "--3GB", "80Gb/s"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"gpu_memory={text!r}: expected a number with a unit of B, KB, MB")):
        parse_bytes(text, "gpu_memory")


def test_rates_tell_bits_from_bytes() -> None:
    assert parse_rate("450GB/s") == 450e9
    assert parse_rate("400Gb/s") == parse_rate("400 Gbps") == 50e9
    assert parse_rate(3e9) == 3e9
    with pytest.raises(
        ValueError, match=r"in_node='450': expected bytes or bits a second, for example 450GB/s or 400Gb/s"
    ):
        parse_rate("450", "in_node")


def test_flops() -> None:
    assert parse_flops("989T") == parse_flops("989 TFLOPS") == parse_flops("0.989 PFLOP/s") == 989e12
    with pytest.raises(ValueError, match=r"flops_16bit='989': expected FLOP/s with a prefix, for example 989T"):
        parse_flops("989", "flops_16bit")


@pytest.mark.parametrize(
    ("text", "sequences"),
    [
        ("1M-tokens", 1e6 / 2048), ("1Mi-tokens", 512), ("4M tokens", 4e6 / 2048), ("2048token", 1), ("512", 512),
        ("512-sequences", 512), ("1k-sequences", 1000), (64, 64),
    ],
)  # fmt: skip
def test_global_batches(text: str | int, sequences: float) -> None:
    assert parse_global_batch(text, 2048) == sequences


@pytest.mark.parametrize("value", [1.5, None, True, [8]])
def test_global_batches_are_whole(value: object) -> None:
    with pytest.raises(TypeError, match=re.escape(f"global_batch={value!r}: expected a whole number of sequences")):
        parse_global_batch(value, 2048)  # type: ignore[arg-type]


def test_what_is_no_global_batch() -> None:
    with pytest.raises(ValueError, match=r"global_batch='1e999-tokens': expected tokens or sequences"):
        parse_global_batch("1e999-tokens", 2048)
    with pytest.raises(
        ValueError, match=r"global_batch='1M-steps': expected tokens or sequences, for example 1M-tokens"
    ):
        parse_global_batch("1M-steps", 2048)


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("end", [0, 1])
def test_each_field_has_a_range(name: str, end: int) -> None:
    low, high, unit = RANGES[name]
    value = low / 2 if end == 0 else high * 2
    changes = {name: int(value) if isinstance(getattr(PRESETS["h100"], name), int) else value}
    if name == "gpus" and end == 1:
        changes["gpus_per_node"] = 1
    expected = f"{name}={shown(changes[name], unit)}: expected {shown(low, unit)} .. {shown(high, unit)}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        replace(PRESETS["h100"], **changes)


@pytest.mark.parametrize("value", [8.0, "8", True, None])
def test_whole_numbers_are_whole(value: object) -> None:
    with pytest.raises(TypeError, match=re.escape(f"gpus={value!r}: expected a whole number in 1 .. 1,000,000")):
        replace(PRESETS["h100"], gpus=value)


def test_a_missing_unit_is_seen() -> None:
    with pytest.raises(ValueError, match=re.escape("gpu_memory=80 B: expected 1 GB .. 10 TB")):
        hardware("h100", gpu_memory="80")


def test_nodes_are_whole() -> None:
    with pytest.raises(ValueError, match="gpus=12: expected a multiple of gpus_per_node=8, or at most one node"):
        hardware("h100", gpus=12)
    assert [hardware("h100", gpus=gpus).nodes for gpus in (1, 7, 8, 16, 64)] == [1, 1, 1, 2, 8]


def test_ram_is_shared_by_the_gpus_of_a_node() -> None:
    assert hardware("h100", gpus=1).host_memory_per_gpu == 2 * 10**12
    assert hardware("h100", gpus=4).host_memory_per_gpu == 5 * 10**11
    assert hardware("h100", gpus=64).host_memory_per_gpu == 25 * 10**10


def test_presets_are_named_and_changed() -> None:
    found = hardware(
        "A100-80GB", gpus=16, gpu_memory="40GiB", between_nodes="200Gb/s", flops_16bit="300T", in_node=None
    )
    expected = replace(PRESETS["a100-80gb"], gpus=16, gpu_memory=40 * 2**30, between_nodes=25e9, flops_16bit=3e14)
    assert found == expected
    with pytest.raises(ValueError, match=r"hardware='a100': expected one of a100-40gb, a100-80gb, h100, h200"):
        hardware("a100")
    with pytest.raises(
        ValueError, match=r"hardware has no field 'gpu_count': expected one of between_nodes, flops_16bit"
    ):
        hardware("h100", gpu_count=8)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_presets_are_plausible(preset: Hardware) -> None:
    """Catches a factor of 1000 or 2 between rates: products over memory bandwidth, and links from fast to slow."""
    assert 50 < preset.flops_16bit / preset.memory_bandwidth < 450
    assert preset.memory_bandwidth > preset.in_node >= preset.host_link > preset.between_nodes / 2
    assert preset.flops_16bit > preset.flops_32bit
