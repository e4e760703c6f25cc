"""What does a kernel gain that shortens all times in its process by a share, and which share is caught?

    uv run python -m benchmarks.judge_gain                 # some minutes; prints a line for each share

The kernel is right, and gives the bench of its process a slower clock (as `tests/exploits/rewrites_the_times.py` does).
The largest share that is still measured is what is left to gain in `cold_us` and `steady_us`; `judged_us` must not move.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import types
from pathlib import Path

from minfer import ops
from minfer.bench import clock
from minfer.ops.hgemm import torch_matmul
from minfer.plan.shard import Shard
from minfer.rows import store
from minfer.worker.supervisor import Supervisor

SHARES = (0, 10, 20, 30, 40, 50, 60, 70, 80)  # percent of its time that the kernel hides
SHAPE = {"m": 8, "n": 1024, "k": 1024}
BEGIN = time.perf_counter()


def shorten(share: int) -> None:
    """From now on the bench of this process reads a clock that hides a share of the time."""
    slower = {"perf_counter": lambda: BEGIN + (1 - share / 100) * (time.perf_counter() - BEGIN)}
    vars(clock)["time"] = types.SimpleNamespace(**vars(time) | slower)


def register() -> None:
    for share in SHARES:

        def kernel(out, a, b, alpha=1.0, beta=0.0, share=share):  # type: ignore[no-untyped-def]
            torch_matmul(out, a, b, alpha, beta)
            shorten(share)

        ops.get("hgemm").torch(f"hides_{share}", kernel)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from benchmarks.judge_honest import QUICK

    with tempfile.TemporaryDirectory(prefix="minfer-judge-") as folder:
        extra = Path(folder) / "cheats.py"
        extra.write_text("from benchmarks.judge_gain import register\n\nregister()\n")
        ops.load_file(extra)
        cases = [ops.get("hgemm").case(f"hides_{share}", "float16", SHAPE) for share in SHARES]
        shard = Shard(
            name="0000", run="gain", folder=folder, results=folder, device="cpu", cases=cases, timing=QUICK,
            case_timeout_s=300.0, build_timeout_s=600.0, untrusted=True, extra=[str(extra)],
        )  # fmt: skip
        supervisor = Supervisor(shard, Path(folder) / "log")
        try:
            supervisor.start()
            supervisor.prepare()
            for case in cases:
                row = supervisor.run(case, None)
                print(line(case.kernel, row), flush=True)
        finally:
            supervisor.end()


def line(kernel: str, row: store.Row) -> str:
    times = "; ".join(f"{name} {row[name]:.4g}" for name in ("cold_us", "steady_us", "judged_us") if row.get(name))
    return f"{kernel:10} {row['status']:12} {times} {row.get('message') or ''}"


if __name__ == "__main__":
    main()
