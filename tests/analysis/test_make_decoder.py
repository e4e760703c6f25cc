"""docs/decoder.md has the rows of the op `decoder`, and what scripts in `benchmarks/` measured of its steps and of serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from minfer.analysis import make
from minfer.analysis.makers.decoder import SERVED, SPLIT, STEPS, TARGETS
from minfer.rows import store
from tests.tables import Workspace, row

LLAMA = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "vocab": 128256}
ABOUT = {"device": "NVIDIA Some", "torch": "2.11", "commit": "abc"}
MODELS = "model,hidden,heads,kv_heads,head_dim,ffn,vocab\nLlama-3.1-8B,4096,32,8,128,14336,128256\n"


def timed(kernel: str, us: float, new: int = 1, **values: Any) -> store.Row:
    shape = LLAMA | {"batch": 1, "context": 1024, "new": new}
    name = ",".join(f"{axis}={size}" for axis, size in shape.items())
    made = row(kernel, us, f"bfloat16//{name}", op="decoder", dtype="bfloat16", params={}, shape=shape, launches=389)
    more = {"steady_rate": 1e6 / us, "steady_gbps": 15e6 / us, "steady_percent_of_peak": 80.0, "roof": "read_gbps"}
    return (
        made
        | {"steady_speedup": 7000 / us, "steady_baseline_us": 7000.0, "workspace_bytes": 2e6, "steady_joules": 4.0}
        | more
        | values
    )


def made(folder: Path, *rows: store.Row, **files: list[dict[str, Any]]) -> str:
    work = Workspace(folder)
    work.readme.write_text("<!-- decoder:begin -->\n<!-- decoder:end -->\n")
    paths = [work.write(*rows)] if rows else []
    page = folder / "docs" / "decoder.md"
    page.parent.mkdir()
    page.write_text(
        "\n".join(f"<!-- {name}:{end} -->" for name in (STEPS, TARGETS, SPLIT, SERVED) for end in ("begin", "end"))
    )
    (folder / "ops").mkdir()
    (folder / "ops" / "models.csv").write_text(MODELS)
    (folder / "measured").mkdir()
    for name, measured in files.items():
        pq.write_table(pa.Table.from_pylist(measured), folder / "measured" / f"{name.replace('_', '-')}-some.parquet")
    places = {
        "results": work.results,
        "readme": work.readme,
        "sources": folder / "ops",
        "benchmarks": folder / "measured",
        "plots": folder / "docs" / "plots",
    }
    words = [word for name, place in places.items() for word in (f"--{name}", str(place))]
    assert make.main(["decoder", *map(str, paths), *words]) == 0
    return page.read_text()


def test_a_line_for_each_problem_and_kernel(tmp_path: Path) -> None:
    wrong = timed("torch_compile", 6500.0) | {"status": "wrong", "steady_us": None, "cold_us": None}
    text = made(tmp_path, timed("minfer", 6000.0), timed("torch", 7000.0), wrong)
    lines = [line for line in text.splitlines() if "decode, batch 1, context 1024" in line]
    assert ["| torch |" in lines[0], "| minfer |" in lines[1], "| wrong |" in lines[2]] == [True] * 3
    assert lines[1].startswith("| Llama-3.1-8B | decode, batch 1, context 1024 | minfer | 6.000 | 166.7 | 2500 |")
    assert "| 80.0 (read_gbps) | 1.167 | 4.00 | 12.2 | 2.00 |" in lines[1]


def test_a_prompts_energy_is_divided_by_its_tokens(tmp_path: Path) -> None:
    text = made(tmp_path, timed("minfer", 6000.0, new=1000))
    (line,) = (line for line in text.splitlines() if "| prefill of 1 × 1000 | minfer |" in line)
    assert "| 0.00400 |" in line


def test_a_step_is_shown_by_operation(tmp_path: Path) -> None:
    step = ABOUT | {"model": "llama-3.1-8b", "batch": 1, "context": 1024, "read_gbps": 3000.0}
    rows = [
        step | {"operation": "qkv", "calls": 32, "us": 640.0, "read_bytes": 3, "floor_us": 512.0},
        step | {"operation": "rope_", "calls": 32, "us": 76.0, "read_bytes": 0, "floor_us": 0.0},
        step | {"operation": "step", "calls": 0, "us": 6400.0, "read_bytes": 3, "floor_us": 4800.0},
    ]
    text = made(tmp_path, decoder_split=rows)
    assert "**llama-3.1-8b, batch 1, context 1024; memory is read at 3000 GB/s**" in text
    assert "| `qkv` | 32 | 640.0 | 10.0% | 512.0 | 0.80 |" in text
    assert "| `rope_` | 32 | 76.00 | 1.2% | — | — |" in text
    assert "](plots/nvidia-some/decoder-split.svg)" in text
    assert "qkv" in (tmp_path / "docs" / "plots" / "nvidia-some" / "decoder-split.svg").read_text()


def test_two_devices_stand_one_after_the_other(tmp_path: Path) -> None:
    about = {"model": "llama-3.1-8b", "batch": 1, "context": 1024, "read_gbps": 3000.0}
    step = about | {"operation": "step", "calls": 0, "us": 6400.0, "read_bytes": 3, "floor_us": 4800.0}
    part = about | {"operation": "qkv", "calls": 32, "us": 640.0, "read_bytes": 3, "floor_us": 512.0}
    one, other = ([ABOUT | {"device": name} | row for row in (part, step)] for name in ("NVIDIA A", "NVIDIA B"))
    rows = [timed("minfer", 6000.0, device=name) for name in ("NVIDIA A", "NVIDIA B")]
    text = made(tmp_path, *rows, decoder_split_a=one, decoder_split_b=other)
    assert [text.count(part) for part in ("**NVIDIA A**", "**NVIDIA B**", "| NVIDIA A | NVIDIA B |")] == [1, 1, 1]
    assert text.index("Measured on NVIDIA A;") < text.index("Measured on NVIDIA B;")
    assert all(
        (tmp_path / "docs" / "plots" / name / "decoder-split.svg").is_file() for name in ("nvidia-a", "nvidia-b")
    )


def test_serving_is_told_by_policy(tmp_path: Path) -> None:
    of = ABOUT | {"requests": 2000, "trace": "conv", "model": "llama-3.1-8b", "generated": 1000, "seconds": 10.0}
    whole = {"steps_s": 9.0, "steps": 50, "tokens_per_s": 100.0, "steps_tokens_per_s": 111.1, "prompt_tokens": 5}
    at_rate = {"rate": 5.0, "first_p50_ms": 90.0, "first_p99_ms": 200.0, "between_p50_ms": 9.0, "between_p99_ms": 30.0}
    rows = [of | whole | {"preempted": 0} | dict.fromkeys(at_rate), of | dict.fromkeys(whole) | at_rate]
    text = made(tmp_path, serve_trace=[row | {"policy": policy} for policy in ("one", "two") for row in rows])
    for policy in ("one", "two"):
        about = f"| llama-3.1-8b | conv | 2,000 | `{policy}` |"
        assert f"{about} 10.0 | 1,000 | 5 | 100 | 50 | 111 | 0.90 | 0 |" in text
        assert f"{about} 5 | 90.0 | 200 | 9.00 | 30.0 |" in text


def test_each_device_has_a_column_of_targets(tmp_path: Path) -> None:
    """The gain counts against the faster of the two compiled ones, at the problem where it is least."""
    plain = {"params": {"quant": "none"}}
    other = {"device": "NVIDIA Other"} | plain
    rows = [
        timed("torch", 7000.0, **plain), timed("minfer", 5600.0, **plain), timed("torch_compile", 6500.0, **plain),
        timed("torch_max_autotune", 6000.0, **plain), timed("torch", 7000.0, **other),
        timed("minfer", 5000.0, steady_percent_of_peak=91.0, **other), timed("torch_compile", 6000.0, **other),
    ]  # fmt: skip
    served = ABOUT | {"device": "NVIDIA Other", "requests": 9, "trace": "conv", "model": "llama-3.2-1b", "generated": 9}
    served |= {"seconds": 10.0, "steps_s": 9.0, "steps": 50, "tokens_per_s": 1.0, "steps_tokens_per_s": 1.1}
    served |= {"prompt_tokens": 5, "preempted": 0, "policy": "continuous", "rate": None}
    text = made(tmp_path, *rows, serve_trace=[served])
    table = [line for line in text.splitlines() if line.endswith((", met |", ", missed |", "measured |", "Other |"))]
    cells = {line.split(" | ")[0].strip("| "): [each.strip(" |") for each in line.split(" | ")[1:]] for line in table}
    devices = cells.pop("")[1:]
    found = {name: dict(zip(devices, row[1:], strict=True)) for name, row in cells.items()}
    one, gain, trace = (
        next(row for name, row in found.items() if part in name) for part in ("batch 1,", "times", "trace")
    )
    this = next(name for name in devices if name != "NVIDIA Other")
    assert one == {this: "80.0 %, missed", "NVIDIA Other": "91.0 %, met"}
    assert gain == {this: "1.07, missed", "NVIDIA Other": "1.20, met"}
    assert trace == {this: "not measured", "NVIDIA Other": "90.0 %, met"}


def test_what_was_not_measured_says_how_to(tmp_path: Path) -> None:
    assert made(tmp_path).count("Nothing was measured yet: `python") == 4


def test_the_readme_has_a_sentence_for_each_batch(tmp_path: Path) -> None:
    made(tmp_path, timed("minfer", 6000.0), timed("torch", 7000.0))
    text = (tmp_path / "README.md").read_text()
    assert "with Llama-3.1-8B (bfloat16, context 1024) takes 6.000 ms at batch 1 (167 tokens/s; " in text
    assert "the floor is 80.0 % of this time; 1.17 times as fast as PyTorch)" in text
