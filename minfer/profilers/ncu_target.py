"""What Nsight Compute watches (`ncu.py`): one call of each case, and before it a marker. Takes a file of JSON: the cases,
the extra files that register kernels, and whether to flush the caches as the bench does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from minfer import ops
from minfer.bench.clock import CudaClock
from minfer.ops import Case
from minfer.profilers.calls import prepare_call


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    for path in request["extra"]:
        ops.load_file(Path(path))
    cudart = torch.cuda.cudart()
    clock = CudaClock(torch.device("cuda")) if request["flush"] else None
    for index, about in enumerate(request["cases"]):
        print(f"\nminfer: case {index}", flush=True)  # ncu may be in the middle of a line
        call = prepare_call(Case(**about), "cuda")
        if clock:
            clock.flush()
        torch.cuda.synchronize()
        cudart.cudaProfilerStart()
        torch.cuda._sleep(1)
        call()
        torch.cuda.synchronize()
        cudart.cudaProfilerStop()
        del call
        torch.cuda.empty_cache()
        print("\nminfer: done", flush=True)


if __name__ == "__main__":
    main()
