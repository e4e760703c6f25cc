"""Imports a task of any known form, and checks all tasks in a folder.

The form follows from the file: a `.py` file is a task of KernelBench, a `.json` file a definition of flashinfer-bench, and a
folder with a `task.yml` a problem of GPU MODE. `python -m minfer.board.importing FILE` checks one task; each task of a folder
is checked so in a process of its own, because its code may do anything.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from minfer.board import flashinfer, gpu_mode, tasks
from minfer.board.foreign import Foreign, Refused, check_op_name, check_outputs, describe_outputs, write_files
from minfer.ops import Draw
from minfer.ops.tensors import DTYPES
from minfer.plan.config import UserError
from minfer.process import forked

LIMIT_S = 120.0  # to check one task
MOST_ELEMENTS = 1 << 28  # of a workload that is run to check a task
IMPORTS, DEGENERATE, REFUSED = "import", "are degenerate", "are refused for another reason"


def write_extra(file: Path, name: str, folder: Path, workloads: Path | None = None) -> tuple[Path, list[str]]:
    """Check a task, and write the file that registers it as an op. Returns that file, and notes about the task. Raises
    Refused."""
    check_op_name(name)
    if file.is_dir():
        return _write_gpu_mode(file, name, folder)
    if file.suffix == ".json":
        about = flashinfer.read_task(file, workloads or find_workloads(file))
        notes = check_task(flashinfer.make_task(about, name))
        content = (json.dumps(about) + "\n").encode()
        return write_files("flashinfer", name, folder, file.name, f"{name}_task.json", content), notes
    if file.suffix == ".py":
        return tasks.write_extra(file, name, folder)
    raise Refused(f"{file} is no task; a task is a .py file, a .json file, or a folder with {gpu_mode.TASK}")


def _write_gpu_mode(source: Path, name: str, folder: Path) -> tuple[Path, list[str]]:
    if not (source / gpu_mode.TASK).is_file():
        raise Refused(f"{source} has no {gpu_mode.TASK}; a folder is a problem of GPU MODE")
    gpu_mode.read_sizes(source / gpu_mode.TASK)
    with tempfile.TemporaryDirectory() as made:
        own = Path(made) / f"{name}_task"
        own.mkdir()
        for file, path in gpu_mode.find_sources(source).items():
            (own / file).write_bytes(path.read_bytes())
        (own / gpu_mode.TASK).write_bytes((source / gpu_mode.TASK).read_bytes())
        known = gpu_mode.measure(gpu_mode.load_problem(own, name))
        (own / gpu_mode.SIZES).write_text(json.dumps(known) + "\n", "utf-8")
        notes = check_task(gpu_mode.make_task(own, name))
        return write_files("gpu_mode", name, folder, source.name, own.name, own), notes


def find_workloads(definition: Path) -> Path:
    """The workloads of a definition: NAME.jsonl beside the definition, or below a folder `workloads` above it, as a data set of
    flashinfer-bench has them. Raises Refused."""
    name = f"{definition.stem}.jsonl"
    if (beside := definition.with_name(name)).is_file():
        return beside
    for above in definition.absolute().parents[:4]:
        if found := sorted((above / "workloads").rglob(name)):
            return found[0]
    raise Refused(
        f"{definition.name} has no workloads: there is no {name} beside it or in a folder workloads; name it with --workloads"
    )


def check_task(task: Foreign) -> list[str]:
    """Run the smallest workload of a task. Returns notes about it. Raises Refused for a task that is degenerate, or cannot be
    run."""
    workload = min(task.workloads, key=lambda each: sum(spec.numel for spec in (*each.tensors, *each.outputs)))
    if (most := sum(spec.numel for spec in (*workload.tensors, *workload.outputs))) > MOST_ELEMENTS:
        raise Refused(
            f"the smallest workload of task {task.name} has {most:,} elements; at most {MOST_ELEMENTS:,} are checked"
        )
    if not workload.tensors:
        raise Refused(f"task {task.name} has no input that is a tensor")

    def make(seed: int) -> dict[str, torch.Tensor]:
        draw = Draw(torch.Generator().manual_seed(seed), random.Random(seed), "normal")
        made: dict[str, torch.Tensor] = {}
        for spec in workload.tensors:
            made[spec.name] = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
            spec.fill.make(made[spec.name], made, draw)
        return made

    try:
        given, fresh = make(1), make(2)
        outputs = check_outputs(
            task.name, given, list(fresh.values()), lambda tensors: task.compute(workload, tensors, workload.scalars)
        )
    except Refused:
        raise
    except Exception as error:  # the reference may raise anything
        raise Refused(
            f"task {task.name} cannot be run: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return describe_outputs(outputs)


# All tasks of a folder.


def find_tasks(folder: Path) -> list[Path]:
    """The tasks of all forms in a folder and below it."""
    problems = {path.parent for path in folder.rglob(gpu_mode.TASK)}
    files = [path for suffix in ("py", "json") for path in folder.rglob(f"*.{suffix}") if path.parent not in problems]
    marks = {".py": "class Model", ".json": '"reference"'}
    found = [path for path in files if marks[path.suffix] in path.read_text("utf-8", errors="replace")]
    return sorted([*found, *problems])


def check_folder(folder: Path) -> list[tuple[Path, str]]:
    """What is wrong with each task of a folder, as a sentence; an empty one for a task that can be imported. Raises
    UserError."""
    found = find_tasks(folder)
    if not found:
        raise UserError(
            f"{folder} has no task; a task is a .py file with Model, a .json file, or a folder with {gpu_mode.TASK}"
        )
    return [(path, check_apart(path)) for path in found]


def check_apart(path: Path) -> str:
    """Check one task in a process of its own. Returns a sentence, or nothing if it can be imported."""
    try:
        done = forked.run(__name__, str(path), timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"{path.name} was not done within {LIMIT_S:g} s"
    if done.returncode in (0, 1):
        return done.stdout.strip().rpartition("\n")[2]
    return f"{path.name} ended its process with status {done.returncode}"


def count(found: list[tuple[Path, str]]) -> Counter[str]:
    """How many tasks can be imported, are degenerate, or are refused for another reason."""
    return Counter(IMPORTS if not why else DEGENERATE if "is degenerate" in why else REFUSED for _, why in found)


def describe_folder(folder: Path, found: list[tuple[Path, str]]) -> str:
    """A line for each task that is refused, and the counts of each folder and of all."""
    lines = [f"{path.relative_to(folder)}: {why}" for path, why in found if why]
    parents = sorted({path.parent for path, _ in found})
    groups = [
        (str(parent.relative_to(folder)), [each for each in found if each[0].parent == parent]) for parent in parents
    ]
    for name, group in [*(groups if len(groups) > 1 else []), ("all", found)]:
        counts = count(group)
        said = ", ".join(f"{counts[kind]} {kind}" for kind in (IMPORTS, DEGENERATE, REFUSED))
        lines.append(f"{name}: {len(group)} task{'s' * (len(group) != 1)}: {said}")
    return "\n".join(lines)


def main() -> int:
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_extra(path, "checked_task", Path(folder))
        except UserError as error:
            print(" ".join(str(error).replace("checked_task", path.stem).split()))
            return 1
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
