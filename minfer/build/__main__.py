"""`python -m minfer.build OP KERNEL [ARCH] [FILE ...]`: builds one kernel in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from minfer.build import build
from minfer.build.errors import BuildError
from minfer.ops import Kernel, get, load_file, names


def find_kernel(op: str, name: str) -> Kernel:
    """Raises SystemExit where there is no such kernel."""
    try:
        kernels = get(op).kernels
    except KeyError:
        sys.exit(f"there is no op {op}; there are {', '.join(names())}")
    if name not in kernels:
        sys.exit(f"{op} has no kernel {name}; it has {', '.join(kernels)}")
    return kernels[name]


def main() -> None:
    """`python -m minfer.build OP KERNEL [ARCH] [FILE ...]`: prints the build as JSON, or exits 1 with the first error.

    FILEs are Python files that register kernels of their own."""
    if len(sys.argv) < 3:
        sys.exit("name what to build: python -m minfer.build OP KERNEL [ARCH] [FILE ...]")
    op, name, arch, *extra = sys.argv[1:] + [""] * (len(sys.argv) < 4)
    reply = os.fdopen(os.dup(1), "w")  # the files and the library, once loaded, may print whatever they like
    os.dup2(2, 1)
    for path in extra:
        load_file(Path(path))
    try:
        built = build(find_kernel(op, name), arch)
        with reply:
            print(json.dumps(asdict(built)), file=reply)
    except BuildError as error:
        print(error.log, file=sys.stderr)
        sys.exit(str(error))


if __name__ == "__main__":
    main()
