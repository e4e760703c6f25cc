"""`analysis/make.py demonstrations`: pictures and texts from traces and files as the scripts of `benchmarks/` write them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import batching, rope_memory, scopes, timelines, transfer
from benchmarks.scopes import Scope, Trace
from minfer.analysis import make
from minfer.analysis.demonstrations import adapting, generated
from minfer.analysis.demonstrations import timelines as draw
from minfer.analysis.demonstrations import traces as demonstrations
from minfer.analysis.demonstrations.traces import Inside
from minfer.analysis.makers.demonstrations import PAGES
from tests.pictures import texts

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


def groupings() -> list[dict]:
    """Rows have 40 % padding, which takes its time unless kernels are told the lengths."""
    rows = []
    for kernel, trace in itertools.product(("attention", "seq_sum"), ("uniform", "zipf")):
        for arrivals, way in itertools.product(("at once", "at random"), batching.ways(batching.SIZES["cpu"])):
            share, ms = (0.0, 6.0) if way.policy.name == "packed" else (0.4, 6.0 if way.told else 10.0)
            about = {
                "kernel": kernel,
                "trace": trace,
                "arrivals": arrivals,
                "policy": way.policy.name,
                "told": way.told,
            }
            figures = {name: [ms, ms, 9 * ms] for name in batching.FIGURES} | {
                "padded_share": [share] * 3,
                "busy_share": [0.5],
            }
            rows.append(about | {"requests": 128} | figures | {"tokens_per_s": [6e6 / ms, 6e6 / ms, 3e6 / ms]} | ABOUT)
    return rows


def adaptings() -> list[dict]:
    """Dispatch adds 280 ns; a variant is twice as fast and in use from half of a trace on."""
    rows = [
        {"kind": "cost", "what": name, "ns": [ns, ns, 9 * ns]}
        for name, ns in (("call", 20.0), ("monitor", 12.0), ("table", 25.0), ("execute", 300.0))
    ]
    gain = {
        "kind": "gain",
        "recipe": "seq_sum_cpp",
        "bytes": 69000,
        "compile_s": 5.0,
        "trial_s": 2.0,
        "generic_us": 10.0,
    }
    rows.append(
        gain
        | {"length": 20, "status": "faster", "variant_us": 5.0, "speedup": 2.0, "low": 1.9, "high": 2.1}
        | {"sizes": "batch 4096, longest 20"}
    )
    rows.append(gain | {"length": 48, "status": "failed", "generic_us": 0.0, "variant_us": 0.0, "speedup": 0.0})
    at = [0.1 * second for second in range(80)]
    for name, faster in (("uniform", 0), ("zipf", 2), ("drift", 3)):
        trials = {
            "faster": faster,
            "not_faster": 1,
            "undecided": int(name == "drift"),
            "failed": 0,
            "loaded": faster,
            "bytes": 64,
        }
        trials |= {"known": 5, "why": "the machine was busy" if name == "drift" else ""}
        found = {"speedup": 1.5, "low": 1.4, "high": 1.6, "aa_spread": 0.01, "verdict": "faster", "budget": 4}
        taken = {"generic_s": [0.1] * 80, "again_s": [0.1] * 80, "adaptive_s": [0.1] * 40 + [0.05] * 40}
        variants = [0] * 40 + [faster] * 40
        trace = {"kind": "trace", "trace": name, "seconds": 8.0, "at": at, "tokens": [1000] * 80, "variants": variants}
        rows.append(trace | trials | found | taken)
    names = dict.fromkeys(name for row in rows for name in row)
    about = {"load": 1.0, "cores": 2, "threads": 1} | ABOUT
    return [{**dict.fromkeys(names), **row, **about} for row in rows]


def layers() -> list[dict]:
    """Inductor takes half of eager's time, and what is fused a quarter."""
    rows = []
    for (shape, batch, seq, past), way in itertools.product(
        (("decode", 1, 1, 15), ("prefill", 2, 16, 0)), ("eager", "inductor", "minfer")
    ):
        us, fused = {"eager": (40.0, []), "inductor": (20.0, []), "minfer": (10.0, ["rms_norm", "rope"])}[way]
        about = {"shape": shape, "batch": batch, "seq": seq, "past": past, "way": way, "fused": fused, "launches": None}
        about |= {
            "calls": 9,
            "bytes": 5_000_000,
            "us": us,
            "samples_us": [us, us, us, 2 * us, 90 * us],
            "dim": 64,
            "hidden": 96,
        }
        about |= {"speedup": 20 / us, "low": 19 / us, "high": 21 / us, "aa_spread": 0.01, "dtype": "float32"}
        rows.append(about | {"verdict": None if way == "inductor" else "faster"} | ABOUT)
    return rows


def fused_loops() -> list[dict]:
    """One loop takes half of the time of two where calls count, and 3/5 where operands do."""
    rows = []
    for elements, two, one in ((1024, 3.0, 1.5), (1 << 24, 50_000.0, 30_000.0)):
        found = {"speedup": two / one, "low": two / one - 0.1, "high": two / one + 0.1, "aa_spread": 0.012}
        taken = {"two_us": [two] * 6, "again_us": [two] * 6, "fused_us": [one] * 6, "verdict": "faster"}
        about = {"elements": elements, "rounds": 6, "calls": 1, "llvm": "20.1.8", "threads": 1, "load": 1.0, "cores": 2}
        rows.append(about | taken | found | ABOUT)
    return rows


def searches() -> list[dict]:
    """The guided search finds twice PyTorch's speed with its third submission."""
    ratios = {"guided": (0.5, None, 2.0, 1.0), "random": (0.5, 0.25, None, 0.75)}
    about = {"op": "softmax", "constants": "{}", "verdict": "ranked", "submission": "a"} | ABOUT
    return [
        about | {"way": way, "number": number, "ratio": ratio, "low": ratio, "high": ratio}
        for way, of in ratios.items()
        for number, ratio in enumerate(of, 1)
    ]


def parts() -> list[dict]:
    """Scopes of 100 ns. Warpgroup 1 is two scopes behind the other; cluster 0 helps with the tiles 8 and 9, and 1 with 9."""
    lanes = [(0, 0, warp, "turn scores softmax out " * 10) for warp in (0, 4)]
    lanes += [(1, block, 0, "keys merge combine") for block in (0, 1)]
    lanes += [(2, 0, 0, "help-8 give-8 help-9 give-9 whole-0"), (2, 2, 0, "help-9 give-9 whole-1")]
    lanes += [(2, 2 * tile, 0, f"whole-2 own-{tile} wait-{tile} add-{tile}") for tile in (8, 9, 10)]
    rows = []
    for number, block, warp, names in lanes:
        case = timelines.TIMELINES[number].case
        about = {"op": case.op, "kernel": case.kernel, "shape": case.shape_name, "block": block, "warp": warp} | ABOUT
        for place, (name, _, tile) in enumerate(scope.partition("-") for scope in names.split()):
            at = {"begin": 100.0 * place + 50 * warp, "end": 100.0 * place + 50 * warp + 100}
            rows.append(about | {"scope": name, "tile": int(tile or 0)} | at)
    return rows


def record(tmp_path: Path) -> Path:
    """A repository in which everything was recorded, with empty pages."""
    for kernel in ("v03_one_wave", "triton_autotuned"):
        scopes.keep(tmp_path / "results" / "nvidia-some" / "scopes" / f"{kernel}.trace.json.gz", trace(kernel))
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.Table.from_pylist(copies()), tmp_path / "rows" / "transfer-nvidia-some.parquet")
    pq.write_table(pa.Table.from_pylist(allocations()), tmp_path / "rows" / "rope-memory-nvidia-some.parquet")
    pq.write_table(pa.Table.from_pylist(groupings()), tmp_path / "rows" / "batching-nvidia-some.parquet")
    pq.write_table(pa.Table.from_pylist(adaptings()), tmp_path / "rows" / "specialise-nvidia-some.parquet")
    pq.write_table(pa.Table.from_pylist(layers()), tmp_path / "rows" / "fusion-nvidia-some.parquet")
    pq.write_table(pa.Table.from_pylist(fused_loops()), tmp_path / "rows" / "llvm-fusion-nvidia-some.parquet")
    pq.write_table(pa.Table.from_pylist(searches()), tmp_path / "rows" / "generate-nvidia-some.parquet")
    pq.write_table(pa.Table.from_pylist(parts()), tmp_path / "rows" / "timelines-nvidia-some.parquet")
    (tmp_path / "docs").mkdir()
    for name, (page, _) in PAGES.items():
        (tmp_path / "docs" / page).write_text(f"# page\n<!-- {name}:begin -->\n<!-- {name}:end -->\n")
    return tmp_path


def made(root: Path, *words: str) -> int:
    folders = {"--results": "results", "--benchmarks": "rows", "--docs": "docs"}
    return make.main(
        ["demonstrations", *(word for option, at in folders.items() for word in (option, str(root / at))), *words]
    )


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return record(tmp_path)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pages, made once of everything that was recorded."""
    root = record(tmp_path_factory.mktemp("recorded"))
    assert made(root) == 0 and made(root, "--check") == 0
    return root / "docs"


def test_pictures_and_texts_are_those_of_the_files(pages: Path) -> None:
    plots = {path.name for path in (pages / "plots" / "nvidia-some").iterdir()}
    assert plots == {f"{name}.svg" for name in PAGES}
    text = (pages / "gemm_bias_relu.md").read_text()
    assert "| v03_one_wave | 3 | 500 | — | 100 | 400 | — |" in text and "commit abc" in text
    text = (pages / "rope.md").read_text()
    assert "| eager | 4 | 0.0 (3.00) | 0.0 (3.00) |" in text and "| fused | 2 |" in text


def test_a_layer_in_two_streams_stands_beside_one_after_the_other(pages: Path) -> None:
    text = (pages / "transfer.md").read_text()
    assert "at 2000 tokens a copy alone takes 2.00 ms, a product alone 2.00 ms, one after the other 4.00 ms" in text
    assert "and in two streams 2.00 ms" in text
    assert "| copies alone, pinned | 2.00 | 2.00 | 2.00 | 50.0 |" in text  # 100 MB in 2 ms; an outlier is no median


def test_each_way_to_group_requests_has_a_line(pages: Path) -> None:
    text = (pages / "batching.md").read_text()
    assert "| attention | zipf | packed | 0.0 % | 1.00 M (0.500–1.00) | 6.00 | 6.00 | 6.00 (6.00–54.0) | 50 % |" in text
    assert "| none, padding computed | 40.0 % | 600 k (300–600) | 10.0 | 10.0 | 10.0 (10.0–90.0) | 50 % |" in text
    assert "padded share of zipf lengths: none 40 %, sorted 40 %, bucketed 40 %, packed 0 %." in text


def test_adapting_has_its_cost_its_gain_and_its_traces(pages: Path) -> None:
    text = (pages / "specialise.md").read_text()
    assert "| monitoring and dispatch, round by round | 280 | 280 |" in text and "over 3 rounds" in text
    gained = "10.0 | 5.00 | 2.00 (1.90–2.10) | 5.0 | 2.0 | 1.000 M | 1.400 M | 69000 |"
    assert f"| seq_sum_cpp | batch 4096, longest 20 | faster | {gained}" in text
    assert "| seq_sum_cpp | longest 48 | failed | — | — | — | 5.0 | 2.0 | — | — | 69000 |" in text
    served = "| drift | 10000 | 20000 | 1.500 (1.400–1.600) faster | 1.0 % | 3 faster, 1 not, 1 undecided | 5 |"
    assert served in text and "Not used, drift: the machine was busy." in text
    assert "256 sequences" not in text
    picture = adapting.adapting(adaptings(), "NVIDIA Some")
    assert picture.about.endswith("last quarter: uniform 1.500, zipf 1.500, drift 1.500.")
    named = [
        [text for text in texts(ax)[1:] if text] for ax in picture.figure.axes
    ]  # a line to a name is an empty text
    assert named == [[*more, "generic again", "adaptive"] for more in ([], ["2"], ["3"])]
    assert len({ax.get_ylim() for ax in picture.figure.axes}) == 1


def test_a_layer_has_its_calls_bytes_and_time_each_way(pages: Path) -> None:
    text = (pages / "fusion.md").read_text()
    assert (
        "| decode 1 × 1, 15 cached | minfer | — | 9 | 5.00 | 10.0 (10.0–20.0) | 2.000 (1.900–2.100) faster | rms_norm, rope |"
    ) in text
    assert "| prefill 2 × 16 | inductor | — | 9 | 5.00 | 20.0 (20.0–40.0) | — | — |" in text


def test_fused_loops_have_a_line_for_each_number_of_elements(pages: Path) -> None:
    text = (pages / "llvm_fusion.md").read_text()
    assert "| 1024 | 3.00 (3.00–3.00) | 1.50 (1.50–1.50) | 2.00 (1.90–2.10) faster | 1.2 % |" in text
    assert "| 16777216 | 50000 (50000–50000) | 30000 (30000–30000) | 1.67 (1.57–1.77) faster | 1.2 % |" in text
    assert "is 2.00 at 1024 elements and 1.67 at 16777216 times as fast as two loops." in text


def test_a_timeline_has_a_line_for_each_lane() -> None:
    lanes = {}
    for kernel in draw.DRAWN:
        found = [row for row in parts() if row["kernel"] == kernel]
        (ax,) = draw.timeline(found, "NVIDIA Some").figure.axes
        lanes[kernel] = {label.get_text() for label in ax.get_yticklabels()}
        assert len(ax.patches) == sum(map(len, draw.lanes_of(found).values()))
    sharing = {"cluster 0 helps 8 and 9", "cluster 1 helps 9", "cluster 8 owns 8", "cluster 9 owns 9"}
    assert [*lanes.values()] == [{"warpgroup 0", "warpgroup 1"}, {"block 0", "block 1"}, sharing]
    both = draw.lanes_of([row for row in parts() if row["kernel"] == "v05_pingpong"]).values()
    assert [(lane[0]["scope"], lane[0]["begin"], lane[-1]["end"]) for lane in both] == [
        ("turn", 1200.0, 3600.0),
        ("softmax", 1200.0, 3600.0),
    ]


def test_where_nothing_was_recorded_the_text_says_so(recorded: Path) -> None:
    for path in (recorded / "rows").iterdir():
        if not path.name.startswith("llvm-fusion-"):
            path.unlink()
    assert made(recorded, "--check") == 1
    assert made(recorded) == 0
    assert (
        "Nothing was recorded yet: `uv run python benchmarks/transfer.py`"
        in (recorded / "docs" / "transfer.md").read_text()
    )
    assert {path.name for path in (recorded / "docs" / "plots").glob("*/*")} == {
        "gemm-bias-relu-scopes.svg",
        "llvm-fusion.svg",
    }


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
    assert all(set(draw.DRAWN[each.case.kernel][1]) == set(each.scopes) for each in timelines.TIMELINES)
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


def test_a_search_shows_the_best_after_each_submission(pages: Path) -> None:
    rows = searches()
    assert generated.find_bests(rows[:4]) == [0.5, 0.5, 2.0, 2.0]
    text = (pages / "board.md").read_text()
    assert "softmax, guided: 2.00 after 4; softmax, random: 0.75 after 4." in text
    assert "| softmax | guided | 4 | 3 | 0.500 (0.500–0.500) | 2.000 (2.000–2.000) | `{}` |" in text
