"""Variants of a CUDA rung that differ in the constants at the top of its file, or of a header that it includes, timed by
the usual pipeline. Needs a GPU.

    uv run python benchmarks/tune_hgemm.py v13_cooperative kStages=3,4 kGroup=4,8,16 -- shape=squares dtype=bfloat16

times the six combinations, the rung as it is and torch; what follows `--` goes to minfer.launch. The variants' sources
and rows stay in runs/tune. One that asks for too much shared memory does not compile, and has a row that says so.
"""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

from minfer import ops
from minfer.ops import Kernel

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "tune"
REGISTER = """from pathlib import Path

from minfer import ops

op = ops.get("hgemm")
rung = op.kernels["{rung}"]
for name in {names}:
    file = Path(__file__).parent / f"{{name}}.cu"
    op.cuda(str(file), archs=rung.archs, dtypes=rung.dtypes, params=rung.params, requires=rung.requires)
"""


def variant(kernel: Kernel, constants: dict[str, str]) -> tuple[str, str]:
    """The name and the source of a rung with other constants. Raises ValueError for one that it does not have."""
    name = "_".join((kernel.name, *(f"{key}{value}" for key, value in constants.items())))
    text = kernel.source.read_text().replace(f"hgemm_{kernel.name}", f"hgemm_{name}")
    for line, header in re.findall(r'^(#include "((?:cuda/gemm/)?\w+\.cuh)")$', text, re.MULTILINE):
        own = kernel.source.parent / header
        included = (own if own.exists() else ROOT / "minfer" / header).read_text()
        if any(re.search(rf"\b{key} = \d+[,;]", included) for key in constants):  # in its place, to be changed with it
            text = text.replace(line, included.replace("#pragma once\n", ""))
    text = re.sub(r'#include "(\w+\.(?:h|cuh))"', rf'#include "ops/{kernel.op}/\1"', text)
    for key, value in constants.items():
        text, found = re.subn(rf"\b{key} = \d+(?=[,;])", f"{key} = {value}", text)
        if found != 1:
            raise ValueError(
                f"{kernel.source.name} has no constant {key} = a number; see the tops of it and of its headers"
            )
    return name, text


def write(kernel: Kernel, grid: dict[str, list[str]], folder: Path) -> tuple[Path, list[str]]:
    """Writes a variant for each combination of a grid, and the file that registers them; its path and their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for values in product(*grid.values()):
        name, text = variant(kernel, dict(zip(grid, values, strict=True)))
        (folder / f"{name}.cu").write_text(text)
        names.append(name)
    register = folder / "register.py"
    register.write_text(REGISTER.format(rung=kernel.name, names=names))
    return register, names


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    rung, *settings = words[:split] or [""]
    kernels = ops.get("hgemm").kernels
    if rung not in kernels or not settings or not all(re.fullmatch(r"\w+=\d+(,\d+)*", word) for word in settings):
        print(f"usage: tune_hgemm.py RUNG CONSTANT=1,2 ... [-- OVERRIDE ...], RUNG one of {', '.join(kernels)}")
        return 2
    grid = {key: values.split(",") for key, _, values in (word.partition("=") for word in settings)}
    try:
        register, names = write(kernels[rung], grid, FOLDER / rung)
    except ValueError as error:
        print(error)
        return 2
    kernel = f"kernel=[torch,{rung},{','.join(names)}]"
    command = [sys.executable, "-m", "minfer.launch", "+sweep=hgemm", f"extra=[{register}]", kernel]
    return subprocess.run([*command, f"results={FOLDER / 'results'}", *words[split + 1 :]], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
