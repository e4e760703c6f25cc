"""`python -m tests.prebuild`: builds the CUDA kernels for the GPU that is here, on half of the processors and behind whatever
else runs. The GPU's tests begin with those that measure, one at a time, while the other processes of pytest wait."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

from minfer import build, ops
from minfer.bench import peaks
from minfer.build import toolchain
from minfer.build.errors import BuildError
from minfer.ops import Kernel

# In a process of its own: what has used a GPU cannot fork.
PROBE = "import torch; print(*torch.cuda.get_device_capability())"


JOBS: list[tuple[Kernel, str]] = []  # a fork has them; they cannot be pickled


def build_one(index: int) -> None:
    try:
        build.build(*JOBS[index])
    except BuildError:
        pass  # the kernel's own tests say it


def main() -> None:
    os.nice(19)
    os.environ["MAX_JOBS"] = "1"
    words = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout.split()
    arch = toolchain.arch_of((int(words[0]), int(words[1])))
    kernels = {kernel.source: kernel for kernel in ops.every_kernel(["cuda"]) if kernel.builds_for(arch)}
    JOBS.extend((kernel, arch) for kernel in (peaks.KERNEL, *kernels.values()))
    with multiprocessing.get_context("fork").Pool(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for _ in pool.imap_unordered(build_one, range(len(JOBS))):
            pass


if __name__ == "__main__":
    main()
