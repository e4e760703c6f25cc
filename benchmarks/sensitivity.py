"""How small a difference does the bench see, and does it ever see one that is not there? Needs a GPU.

    uv run python benchmarks/sensitivity.py            # about three minutes; writes benchmarks/results/

With NVIDIA's nvbench for Python (`uv pip install cuda-bench[cu13]`) its cold times are compared too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console

from minfer import ops
from minfer.bench import device as devices
from minfer.bench.clock import CudaClock
from minfer.bench.measure import Bench
from minfer.bench.stats import compare
from minfer.bench.timing import Timing
from minfer.ops import Case
from minfer.rows import store
from minfer.run.start import commit_of_sources

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "results"
TIMING = Timing()
Function = Callable[..., None]

AA_SHAPES = [(1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (16, 14336, 4096)]
AA_RUNS = 50  # of each shape
SLOWED_RUNS = 100
SPIN_CYCLES = 100_000
STEADY_SHAPES = [(2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (16, 14336, 4096)]
COLD_SHAPES = [(16, 28672, 8192), (128, 28672, 8192), (2048, 8192, 4096), (4096, 4096, 4096), (8192, 8192, 8192)]


def case(shape: tuple[int, int, int]) -> Case:
    return ops.get("hgemm").case("torch", "bfloat16", dict(zip("mnk", shape, strict=True)))


def bench(shape: tuple[int, int, int], kernel: Function, baseline: Function, seed: int = 1) -> Bench:
    made = Bench(ops.get("hgemm"), case(shape), kernel, baseline, devices.pick("cuda"), seed)
    made.warm_up(1.0)
    return made


def torch_mm() -> Function:
    function = ops.get("hgemm").kernels["torch"].function
    assert function is not None
    return function


def spinning(cycles: int) -> Function:
    """A product, and after it a spin of so many SM cycles."""
    multiply = torch_mm()

    def function(*operands: Any, **call: Any) -> None:
        multiply(*operands, **call)
        torch.cuda._sleep(cycles)

    return function


def same_against_itself() -> Iterator[dict[str, Any]]:
    """A/A: whatever is not a tie is a false alarm."""
    verdicts: list[str] = []
    for shape in AA_SHAPES:
        timed = bench(shape, torch_mm(), torch_mm())
        verdicts += [compare(*timed.cold(TIMING).T).verdict for _ in range(AA_RUNS)]
    share = sum(verdict != "tie" for verdict in verdicts) / len(verdicts)
    yield row("A/A: the same kernel against itself", f"not a tie, of {len(verdicts)}", share, 0.02, "share")


def slowed() -> Iterator[dict[str, Any]]:
    """A kernel that spins for 2 % and for 0.5 % of its own time longer."""
    shape = (512, 512, 512)
    once, twice = (bench(shape, spinning(n * SPIN_CYCLES), spinning(SPIN_CYCLES)).cold(TIMING)[:, 0] for n in (1, 2))
    base_s = float(np.median(once))
    cycles_a_second = SPIN_CYCLES / (float(np.median(twice)) - base_s)
    for percent in (2.0, 0.5):
        extra = round(percent / 100 * base_s * cycles_a_second)
        timed = bench(shape, spinning(SPIN_CYCLES + extra), spinning(SPIN_CYCLES))
        comparisons = [compare(*timed.cold(TIMING).T) for _ in range(SLOWED_RUNS)]
        found = float(np.median([1 / c.speedup - 1 for c in comparisons]))
        what = f"slowed by {percent:g} % (found: {found:.2%})"
        if percent == 2.0:
            missed = sum(c.verdict != "slower" for c in comparisons) / SLOWED_RUNS
            yield row(what, f"not called slower, of {SLOWED_RUNS}", missed, 0.05, "share")
        wrong = sum(c.verdict == "faster" for c in comparisons) / SLOWED_RUNS
        yield row(what, f"called faster, of {SLOWED_RUNS}", wrong, 0.0, "share")


def steady_medians() -> dict[str, float]:
    """Steady medians in microseconds, of a library's and of our own kernels."""
    found = {}
    for shape in STEADY_SHAPES:
        first, *_, last = bench(shape, torch_mm(), torch_mm()).steady(TIMING, lambda: None)
        found[name(shape)] = float(np.median(np.concatenate([first, last]))) * 1e6
    return found


def two_processes() -> Iterator[dict[str, Any]]:
    """The same steady measurement in two processes, one after the other."""
    first, second = (json.loads(in_process("--steady-medians")) for _ in range(2))
    for key in first:
        apart = abs(first[key] / second[key] - 1)
        yield row(
            f"steady, {key}", f"two processes: {first[key]:.1f} and {second[key]:.1f} µs", apart, 0.01, "relative"
        )


def against_nvbench() -> Iterator[dict[str, Any]]:
    """nvbench's cold time of the same call on the same operands, between two measurements of ours.

    nvbench's flush leaves the cache full of dirty lines, which are written back in the window; ours reads. With nvbench's way
    of flushing we should find its times; how far ours are from them with our way is shown, and is no target."""
    if importlib.util.find_spec("cuda.bench") is None:
        return
    for shape, found in json.loads(in_process("--nvbench")).items():
        for flush in ("writing", "reading"):
            ours, other = float(np.mean(found[flush])), found["nvbench"]
            what = f"nvbench {other:.1f} µs; minfer, {flush} flush, before and after it: "
            what += " and ".join(f"{us:.1f}" for us in found[flush])
            yield row(f"cold, {shape}", what, abs(ours / other - 1), 0.02 if flush == "writing" else None, "relative")


def nvbench_times() -> dict[str, dict[str, Any]]:
    """By shape, cold GPU times in microseconds: nvbench's (its median where this version has one, else its mean), and
    ours with either flush, before and after it."""
    import cuda.bench as nvbench

    found: dict[str, dict[str, Any]] = {}

    def product(state: Any) -> None:
        key = state.get_string("shape")
        timed = bench(tuple(int(size) for size in key.split("x")), torch_mm(), torch_mm())  # type: ignore[arg-type]
        clock = timed.clock
        assert isinstance(clock, CudaClock)
        flushes = {"reading": clock.flush, "writing": clock.buffer.zero_}
        ours: dict[str, Any] = {flush: [] for flush in flushes}
        found[key] = ours
        stream = torch.cuda.ExternalStream(state.get_stream().addressof())

        def launch(_: Any) -> None:
            with torch.cuda.stream(stream):
                timed.candidates[0](0)

        def measure(*order: str) -> None:
            for flush in order:
                clock.flush = flushes[flush]  # type: ignore[method-assign, assignment]
                ours[flush].append(float(np.median(timed.cold(TIMING)[:, 0])) * 1e6)

        measure("reading", "writing")
        state.exec(launch, batched=False)
        measure("writing", "reading")

    nvbench.register(product).add_string_axis("shape", [name(shape) for shape in COLD_SHAPES])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "nvbench.json"
        nvbench.run_all_benchmarks(["nvbench", "--json", str(report), "--quiet"])
        states = json.loads(report.read_text())["benchmarks"][0]["states"]
    for ours, state in zip(found.values(), states, strict=True):
        values = {s["tag"]: s["data"][0]["value"] for s in state["summaries"] if s.get("data")}
        tag = next(tag for tag in ("nv/cold/time/gpu/median", "nv/cold/time/gpu/mean") if tag in values)
        ours["nvbench"] = float(values[tag]) * 1e6
    return found


def name(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)


def in_process(flag: str) -> str:
    """The last line that this script prints with a flag, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, flag], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{flag} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip().splitlines()[-1]


def row(check: str, what: str, value: float, target: float | None, unit: str) -> dict[str, Any]:
    met = None if target is None else value <= target
    return {"check": check, "what": what, "value": value, "target": target, "unit": unit, "met": met}


def measure(console: Console) -> Path:
    """Every check, printed as it is done and written as parquet."""
    rows = []
    for check in (same_against_itself, slowed, two_processes, against_nvbench):
        for found in check():
            rows.append(found)
            said = {True: "met   ", False: "MISSED", None: "shown "}[found["met"]]
            console.print(f"{said} {found['check']}: {found['what']}: {percent(found)}")
    environment = devices.environment(devices.pick("cuda"))
    about = {key: environment[key] for key in ("device", "driver", "torch")} | {"commit": commit_of_sources()}
    table = pa.Table.from_pylist([found | about for found in rows])
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"sensitivity-{store.slug(environment['device'])}.parquet"
    pq.write_table(table, path)
    return path


def percent(found: dict[str, Any]) -> str:
    return f"{100 * found['value']:.2f} % (at most {100 * found['target']:g} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steady-medians", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nvbench", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("sensitivity.py needs a CUDA GPU, and this machine has none")
    if options.steady_medians:
        print(json.dumps(steady_medians()))
    elif options.nvbench:
        print(json.dumps(nvbench_times()))
    else:
        print(f"written: {measure(Console(highlight=False, markup=False))}")


if __name__ == "__main__":
    main()
