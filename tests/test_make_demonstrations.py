"""`analysis/make_demonstrations.py`: pictures and texts from traces and files as the scripts of `benchmarks/` write them."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import demonstrations
from analysis.demonstrations import Inside
from analysis.make_demonstrations import PAGES, main
from benchmarks import rope_memory, scopes, transfer
from benchmarks.scopes import Scope, Trace

ABOUT = {"device": "NVIDIA Some", "driver": "1.2", "torch": "2.11", "commit": "abc"}


def trace(kernel: str, blocks: int = 3) -> dict:
    """Blocks of two warps, of which block b takes 100 (b + 1) cycles for each of two products."""
    found = []
    for block in range(blocks):
        long = 100 * (block + 1)
        for warp in (0, 1):
            for step in (0, 1):
                at = step * (long + 50)
                found += [
                    Scope("load", block, warp, at, at + 50),
                    Scope("product", block, warp, at + 50, at + 50 + long),
                ]
    about = ABOUT | {"kernel": kernel, "op": "gemm_bias_relu", "shape": {"m": 8, "n": 8, "k": 8}}
    return scopes.chrome(Trace(found, dict.fromkeys(range(blocks), 0)), 1000.0, about)


def copies() -> list[dict]:
    """A copy takes 2 ms a layer and pageable 5, a product 1 µs a token."""
    rows = []
    for tokens in (1, 1000, 2000):
        product = tokens * 1e-3
        for mode in transfer.MODES:
            copy = {"device": 0.0, "pinned": 2.0, "pageable": 5.0}[mode.memory]
            own = product if mode.multiplies else 0.0
            ms = max(copy, own) if mode.streams == 2 else copy + own
            about = {"mode": mode.name, "tokens": tokens, "layers": 8, "bytes": 100_000_000, "flops": 1.0}
            rows.append(about | {"ms": [8 * ms, 8 * ms, 80 * ms], "host_ms": [0.8] * 3} | ABOUT)
    return rows


def allocations() -> list[dict]:
    """Eager has 3 tensors at a time, fused 2."""
    rows = []
    for name, changes in {"eager": [1, 1, 1, -2, 1, -1], "fused": [1, 1]}.items():
        total = 0
        for index, change in enumerate(changes):
            total += change
            part = "forward" if index < len(changes) / 2 else "backward"
            row = {"name": name, "us": 10.0 * index, "part": part, "bytes": 1000 * change, "allocated": 1000 * total}
            rows.append(row | {"shape": [1, 2, 3, 4], "tensor_bytes": 1000} | ABOUT)
    return rows


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A repository in which everything was recorded, with empty pages."""
    for kernel in ("v03_one_wave", "triton_autotuned"):
        scopes.keep(tmp_path / "results" / "nvidia-some" / "scopes" / f"{kernel}.trace.json.gz", trace(kernel))
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.Table.from_pylist(copies()), tmp_path / "rows" / "transfer-nvidia-some.parquet")
    pq.write_table(pa.Table.from_pylist(allocations()), tmp_path / "rows" / "rope-memory-nvidia-some.parquet")
    (tmp_path / "docs").mkdir()
    for name, (page, _) in PAGES.items():
        (tmp_path / "docs" / page).write_text(f"# page\n<!-- {name}:begin -->\n<!-- {name}:end -->\n")
    return tmp_path


def made(root: Path, *words: str) -> int:
    folders = {"--results": "results", "--benchmarks": "rows", "--docs": "docs"}
    return main([*(word for option, at in folders.items() for word in (option, str(root / at))), *words])


def test_pictures_and_texts_are_those_of_the_files(recorded: Path) -> None:
    assert made(recorded, "--check") == 1
    assert made(recorded) == 0 and made(recorded, "--check") == 0
    plots = {path.name for path in (recorded / "docs" / "plots" / "nvidia-some").iterdir()}
    assert plots == {
        f"{name}{theme}.{suffix}" for name in PAGES for theme in ("", "-dark") for suffix in ("svg", "png")
    }
    text = (recorded / "docs" / "gemm_bias_relu.md").read_text()
    assert "| v03_one_wave | 3 | 500 | — | 100 | 400 | — |" in text and "commit abc" in text
    text = (recorded / "docs" / "rope.md").read_text()
    assert "| eager | 4 | 0.0 (3.00) | 0.0 (3.00) |" in text and "| fused | 2 |" in text


def test_a_layer_in_two_streams_stands_beside_one_after_the_other(recorded: Path) -> None:
    assert made(recorded) == 0
    text = (recorded / "docs" / "transfer.md").read_text()
    assert "at 2000 tokens a copy alone takes 2.00 ms, a product alone 2.00 ms, one after the other 4.00 ms" in text
    assert "and in two streams 2.00 ms" in text
    assert "| copies alone, pinned | 2.00 | 2.00 | 2.00 | 50.0 |" in text  # 100 MB in 2 ms; an outlier is no median


def test_where_nothing_was_recorded_the_text_says_so(recorded: Path) -> None:
    (recorded / "rows" / "transfer-nvidia-some.parquet").unlink()
    assert made(recorded) == 0
    assert (
        "Nothing was recorded yet: `uv run python benchmarks/transfer.py`"
        in (recorded / "docs" / "transfer.md").read_text()
    )
    assert not list((recorded / "docs" / "plots").glob("*/transfer*"))


@pytest.mark.parametrize("content", [b"", b"no gzip"])
def test_a_file_that_is_none_is_a_sentence(recorded: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (recorded / "results" / "nvidia-some" / "scopes" / "v03_one_wave.trace.json.gz").write_bytes(content)
    (recorded / "rows" / "transfer-nvidia-some.parquet").write_bytes(content)
    assert made(recorded) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all("nvidia-some" in error for error in errors)


def test_the_block_of_median_length_is_shown() -> None:
    inside = Inside.of(trace("v03_one_wave"))
    assert inside.typical == "block 1" and inside.span("block 1") == (0, pytest.approx(500))
    assert inside.totals() == {"load": pytest.approx(100), "product": pytest.approx(400)}


def test_the_names_of_scopes_are_those_of_the_script() -> None:
    assert demonstrations.ORDER == scopes.NAMES and set(demonstrations.WORDS) == set(scopes.NAMES)
    assert set(demonstrations.LINES) <= {mode.name for mode in transfer.MODES}


def test_the_timeline_of_a_trace_of_pytorch() -> None:
    def part(name: str, ts: float, dur: float) -> dict:
        return {"name": name, "cat": "user_annotation", "ph": "X", "ts": ts, "dur": dur}

    def change(ts: float, size: int, kind: int = 1) -> dict:
        return {"name": "[memory]", "ph": "i", "ts": ts, "args": {"Bytes": size, "Device Type": kind, "Device Id": 0}}

    events = [part("forward", 100, 10), part("backward", 120, 10), change(125, 40), change(101, 100), change(108, -30)]
    events += [change(103, 7, kind=0), change(95, 1), {"name": "aten::mul", "ph": "X", "ts": 101, "dur": 3}]
    random.Random(0).shuffle(events)
    found = rope_memory.timeline(events, on_gpu=True)
    assert [(row["us"], row["part"], row["bytes"], row["allocated"]) for row in found] == [
        (-5, "", 1, 1), (1, "forward", 100, 101), (8, "forward", -30, 71), (25, "backward", 40, 111)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="0 allocations"):
        rope_memory.timeline([part("forward", 0, 1), part("backward", 2, 1)], on_gpu=True)
