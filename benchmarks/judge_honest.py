"""Does the judge accuse honest kernels? Every CPU kernel of some ops, judged (`untrusted=true`) again and again beside
processes that keep the processors busy.

    uv run python -m benchmarks.judge_honest                    # 500 cases beside two busy loops: most of an hour
    uv run python -m benchmarks.judge_honest --resume           # goes on after the cases that the file has already
    uv run python -m benchmarks.judge_honest --device cuda --cases 100 --beside 0
    uv run python -m benchmarks.judge_honest --minutes 10       # as many of the 500 as that takes
    uv run python -m benchmarks.judge_honest --groups 8         # 8 at a time, each on 2 processors with 2 busy loops
    uv run python -m benchmarks.judge_honest --beside 0 --threads 1 --name judge-busy    # on a machine that others keep busy
    uv run python -m benchmarks.judge_honest --cases 20 --beside 0 --trusted    # what untrusted=true costs

All kernels here are ours and honest. So a row that is `dishonest`, `wrong` or `impossible` is a false accusation, and there
must be none. `error` says that the machine was too busy to judge; such a case proves nothing, and is counted apart. Writes
benchmarks/results/<name>-<device>.parquet after each case: its status, how long it took, the machine's load average, and by
which factor the times outside of the kernel's process lay above those inside. torch.compile is left out: it compiles for a
minute before each measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from minfer import ops
from minfer.bench import device as devices
from minfer.bench import judged
from minfer.bench.timing import Timing
from minfer.ops import Case
from minfer.plan.shard import Shard
from minfer.rows import store
from minfer.run.start import commit_of_sources
from minfer.worker.compiler import Compiler
from minfer.worker.supervisor import Supervisor

FOLDER = Path(__file__).parent / "results"
ACCUSATIONS = ("dishonest", "wrong", "impossible")
QUICK = Timing("quick", warmup_s=0.02, looks=[10, 30], precision=0.05, cold_cap_s=1, steady_block_s=0.05)
GEMM = {"cpu": ((8, 512, 512), (128, 128, 128), (1, 1024, 1024)), "cuda": ((512, 512, 512), (2048, 2048, 2048))}
ROWS = {"cpu": ((16, 1024), (256, 512)), "cuda": ((2048, 4096),)}


def honest(device: str) -> list[Case]:
    """The cases: small ones and larger ones, with much and with little library code beneath the baseline."""
    found = []
    for name, axes, sizes in (
        ("rmsnorm", ("tokens", "hidden"), ROWS[device]),
        ("softmax", ("rows", "n"), ROWS[device][:1]),
        ("sgemm", ("m", "n", "k"), GEMM[device][:1]),
        ("hgemm", ("m", "n", "k"), GEMM[device]),
    ):
        op = ops.get(name)
        for kernel in op.kernels.values():
            if kernel.elsewhere(device) or kernel.returns or kernel.backend == "triton" or "compile" in kernel.name:
                continue
            for size in sizes:
                case = op.case(kernel.name, kernel.dtypes[0], dict(zip(axes, size, strict=True)))
                if kernel.unsupported(case, None) is None:
                    found.append(case)
    return found


class Runner:
    """Runs cases with a supervisor of its own, with `untrusted=true` or without."""

    def __init__(self, device: str, cases: list[Case], folder: Path, untrusted: bool) -> None:
        folder.mkdir()
        shard = Shard(
            name="0000", run="honest", folder=str(folder), results=str(folder), device=device, cases=cases, timing=QUICK,
            case_timeout_s=300.0, build_timeout_s=600.0, untrusted=untrusted,
        )  # fmt: skip
        self.supervisor = Supervisor(shard, folder / "0000.log")
        machine = self.supervisor.start()
        self.cases = [case for case in cases if self.supervisor.unsupported(case) is None]
        self.built = Compiler(shard, machine.arch, lambda **event: None).compile(self.cases)
        self.supervisor.prepare()

    def run(self, case: Case) -> tuple[store.Row, float]:
        """The row of a case, and the seconds that it took."""
        begin = time.perf_counter()
        row = self.supervisor.run(case, self.built.get(f"{case.op}/{case.kernel}"))
        return row, time.perf_counter() - begin


def pairs_of_processors(count: int) -> list[set[int]]:
    """So many pairs of the processors that this process may use. Raises SystemExit if there are too few."""
    may = sorted(os.sched_getaffinity(0))
    if len(may) < 2 * count:
        raise SystemExit(f"--groups {count} needs {2 * count} processors, and this process may use {len(may)}")
    return [set(may[2 * i : 2 * i + 2]) for i in range(count)]


def run_groups(count: int, cases: int, path: Path) -> list[store.Row]:
    """Run `count` copies of this program with the same options, and return all their rows. Each copy judges its part of the
    cases on two processors of its own, with its own busy loops."""
    firsts = [cases * i // count for i in range(count + 1)]
    places = [path.with_stem(f"{path.stem}-{i}") for i in range(count)]
    started = []
    for first, until, place, processors in zip(firsts, firsts[1:], places, pairs_of_processors(count), strict=False):
        part = ["--groups", "1", "--first", str(first), "--cases", str(until - first), "--to", str(place)]
        command = [sys.executable, "-m", "benchmarks.judge_honest", *sys.argv[1:], *part]
        started.append(subprocess.Popen(command, preexec_fn=functools.partial(os.sched_setaffinity, 0, processors)))
    # Ctrl-C reaches the copies, too; what they have judged until then is kept.
    with contextlib.suppress(KeyboardInterrupt):
        for process in started:
            process.wait()
    for process, place in zip(started, places, strict=True):
        process.wait()
        if not place.exists():
            print(f"group {place.stem.rpartition('-')[2]} judged no case", file=sys.stderr)
    rows = [row for place in places if place.exists() for row in pq.read_table(place).to_pylist()]
    for place in places:
        place.unlink(missing_ok=True)
    return rows


def write(rows: list[store.Row], path: Path) -> None:
    partial = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows), partial)
    partial.replace(path)


def run(
    device: str, first: int, wanted: int, trusted: bool, folder: Path
) -> Iterator[tuple[Case, store.Row, float, float | None]]:
    """The cases from `first` up to `wanted`, in rounds of all cases. Each round has an order of its own, so that groups which
    begin with a round do not all begin with the same cases. Each case comes with its row and the seconds that it took; and if
    `trusted`, the seconds that it takes when it is trusted."""
    with contextlib.ExitStack() as ended:
        judged = Runner(device, honest(device), folder / "judged", untrusted=True)
        ended.callback(judged.supervisor.end)
        plain = Runner(device, judged.cases, folder / "plain", untrusted=False) if trusted else None
        if plain:
            ended.callback(plain.supervisor.end)
        for number in range(first, wanted):
            of_round, place = divmod(number, len(judged.cases))
            case = random.Random(of_round).sample(judged.cases, len(judged.cases))[place]
            row, seconds = judged.run(case)
            yield case, row, seconds, plain.run(case)[1] if plain else None


def recorded() -> list[tuple[judged.Contradiction | None, judged.Samples, str]]:
    """What each comparison of the times inside with the judge's samples finds from now on, these samples, and the status by the
    times inside alone."""
    found: list[tuple[judged.Contradiction | None, judged.Samples, str]] = []
    compare = judged.contradiction

    def recording(row: Any, samples: judged.Samples, device: str) -> judged.Contradiction | None:
        found.append((compare(row, samples, device), samples, str(row["status"])))
        return found[-1][0]

    judged.contradiction = recording
    return found


def busy(count: int) -> list[subprocess.Popen[bytes]]:
    """So many processes that do nothing but keep a processor busy, until this one ends."""
    loop = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    return [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]


def ratio(row: store.Row, outside: str, inside: str) -> float | None:
    return row[outside] / row[inside] if row.get(outside) and row.get(inside) else None


def measure(device: str, first: int, wanted: int, trusted: bool, beside: int, minutes: float) -> Iterator[store.Row]:
    """A row for each case from `first` up to `wanted`, printed as it is done; no case begins after so many minutes."""
    end = time.perf_counter() + 60 * minutes
    loops, attempts = busy(beside), recorded()
    try:
        with tempfile.TemporaryDirectory(prefix="minfer-judge-") as folder:
            cases = run(device, first, wanted, trusted, Path(folder))
            for number, (case, row, seconds, trusted_s) in enumerate(cases, first + 1):
                found = {
                    "case": case.key,
                    "status": row["status"],
                    "message": row.get("message"),
                    "guarantee": row.get("guarantee"),
                    "seconds": seconds,
                    "load": os.getloadavg()[1],
                    "trusted_s": trusted_s,
                    "attempts": len(attempts),
                    "proven": sum(doubt is not None and doubt.proven for doubt, *_ in attempts),
                    "status_inside": attempts[-1][2] if attempts else None,
                    "calls": attempts[-1][1].calls.tolist()
                    if attempts
                    else None,  # of the kernel's block and of the baseline's
                    "blocks_us": row.get("judged_samples_us"),
                    "baseline_blocks_us": row.get("judged_baseline_samples_us"),
                    "kernel_factor": ratio(row, "judged_us", "steady_us"),
                    "baseline_factor": ratio(row, "judged_baseline_us", "steady_baseline_us"),
                    "judged_speedup": row.get("judged_speedup"),
                    "steady_speedup": row.get("steady_speedup"),
                }
                attempts.clear()
                factors = ", ".join(f"{found[n]:.2f}" for n in ("kernel_factor", "baseline_factor") if found[n])
                tries = f"{found['attempts']} attempts, {found['proven']} proven"
                words = f"{row['status']:12} {tries}; {factors} {case.key} {row.get('message') or ''}"
                print(f"{number:4d} {seconds:5.1f} s {words}", flush=True)
                yield found
                if time.perf_counter() > end:
                    break
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def summary(rows: list[store.Row]) -> str:
    counts = Counter(row["status"] for row in rows)
    factors = np.array([row["kernel_factor"] for row in rows if row["kernel_factor"]])
    spread = (
        f"outside over inside: median {np.median(factors):.2f}, largest {factors.max():.2f}; " if len(factors) else ""
    )
    seconds = np.array([row["seconds"] for row in rows])
    tries = ", ".join(f"{n} after {k} attempts" for k, n in sorted(Counter(row["attempts"] for row in rows).items()))
    accused = sum(counts[status] for status in ACCUSATIONS)
    judged = accused + sum(counts[status] for status in store.MEASURED)
    told = ", ".join(f"{n} {status}" for status, n in counts.most_common())
    of = f"{accused} accusations of {judged} judged cases; {len(rows) - judged} of {len(rows)} could not be judged"
    more = [row["seconds"] - row["trusted_s"] for row in rows if row.get("trusted_s") is not None]
    cost = (
        f", {np.median(more):.1f} s more than a trusted one, at most {max(more):.1f} s ({len(more)} cases)"
        if more
        else ""
    )
    return f"{of}: {told}; {tries}; {spread}{np.median(seconds):.1f} s a case in the median{cost}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--beside", type=int, default=2, help="busy loops that run beside (default: 2)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="in which the last case begins (default: no limit)"
    )
    parser.add_argument("--trusted", action="store_true", help="also time each case when it is trusted")
    parser.add_argument("--threads", type=int, help="of PyTorch in each process (default: its own choice)")
    parser.add_argument("--name", default="judge", help="of the file, before the device's name (default: judge)")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the file, and go on after them")
    parser.add_argument("--groups", type=int, default=1, help="cases at a time, each on two processors (default: 1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case, from 0")
    parser.add_argument("--to", type=Path, help="the file, instead of the one that --name says")
    options = parser.parse_args()
    if options.groups > 1 and (options.resume or options.first):
        parser.error("--groups begins at the first case, in a new file: leave out --resume and --first")
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for all processes; each of several waits for the others
        torch.set_num_threads(options.threads)
    environment = devices.environment(devices.pick(options.device))
    about = {name: environment[name] for name in ("device", "torch")}
    about |= {"commit": commit_of_sources(), "beside": options.beside, "threads": torch.get_num_threads()}
    about |= {"processors": len(os.sched_getaffinity(0))}
    path = options.to or FOLDER / f"{options.name}-{store.slug(environment['device'])}.parquet"
    rows = pq.read_table(path).to_pylist() if options.resume and path.exists() else []
    if options.groups > 1:
        rows = run_groups(options.groups, options.cases, path)
        if not rows:
            sys.exit("no group judged a case, so nothing is written")
        write(rows, path)
    else:
        first, end = options.first + len(rows), options.first + options.cases
        for row in measure(options.device, first, end, options.trusted, options.beside, options.minutes):
            rows.append(row | about)
            write(rows, path)
    print(summary(rows) + ("" if options.to else f"\nwritten: {path}"))
    sys.exit(
        not any(row["status"] in store.MEASURED for row in rows) or any(row["status"] in ACCUSATIONS for row in rows)
    )


if __name__ == "__main__":
    main()
