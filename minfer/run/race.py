"""`minfer race A B`: the kernels of two git revisions, timed against each other in the same rounds.

Both revisions' sources are unpacked below the run's folder, each with its own headers, and each kernel is registered from
there, as `kernel@revision`: B's kernels are the candidates, and the baseline of each is A's kernel of that name. All that is
measured is measured by the same bench, this checkout's, in one process. Rows go to `results/apart/race`: they are no part of
the ladder.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from rich.console import Console

from minfer import ops
from minfer.jobs import executors
from minfer.jobs.run import CONFIG
from minfer.ops import PACKAGE, Kernel, Op
from minfer.plan.config import INSTALLED, Config, UserError, choose, names
from minfer.rows import store
from minfer.run import start, terminal

TREE = "."  # stands for the files as they are
RESULTS = Path("results") / store.APART / "race"


def check(revision: str) -> None:
    """Raises UserError where there is no such revision."""
    if INSTALLED:
        raise UserError("a race needs a clone of minfer, with its history; this is an installed package")
    if revision != TREE and not _git("ls-tree", "--name-only", f"{revision}^{{commit}}", "minfer/ops/"):
        raise UserError(f"git knows no revision {revision} with kernels of minfer; name a commit, a branch or .")


def race(config: Config, first: str, second: str) -> int:
    """Run a request's kernels of the second revision against the same of the first one. Returns the exit status of the run.
    Raises UserError."""
    console = terminal.console()
    op = ops.get(choose("op", config.op, ops.names()))
    folder = Path(config.runs).absolute() / f"race-{start.make_run_id()}"
    before = _list_runs(folder.parent)
    try:
        return start.run(_unpack_both(console, config, op, (first, second), folder))
    finally:
        if _list_runs(folder.parent) <= before:  # it was refused, or a dry run
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()  # if it is empty


def _list_runs(folder: Path) -> set[Path]:
    return set(folder.glob(f"*/{CONFIG}"))


def _unpack_both(console: Console, config: Config, op: Op, revisions: tuple[str, str], folder: Path) -> Config:
    """Unpack both revisions below a folder, and make the request one for the second's kernels. Raises UserError if none is left
    to race."""
    first, second = revisions
    kernels, device = _kernels(config, op)
    labels = [_label(revision) for revision in (first, second)]
    labels[1] += "-again" if labels[0] == labels[1] else ""
    trees = [unpack(revision, folder / label) for revision, label in zip(revisions, labels, strict=True)]
    chosen, same, missing, elsewhere = [], [], [], []
    everything = names(config.kernel) == ["all"]
    for kernel in kernels:
        texts = [_text(kernel, tree) for tree in trees]
        if everything and kernel.elsewhere(device):
            elsewhere += [kernel.name] if None not in texts and texts[0] != texts[1] else []
        elif None in texts:
            missing.append(kernel.name)
        elif texts[0] == texts[1] and everything:
            same.append(kernel.name)
        else:
            chosen.append(kernel)
    for left_out, why in ((same, "the same in both"), (missing, "not in both")):
        if left_out:
            console.print(f"Left out: {', '.join(left_out)}: {why}.", soft_wrap=True)
    if not chosen:
        raise UserError(f"no kernel of {op.name} to race: {_explain_none(revisions, device, same, missing, elsewhere)}")
    config.kernel = [f"{kernel.name}@{labels[1]}" for kernel in chosen]
    config.extra = [*config.extra, str(register(op, chosen, labels, folder))]
    config.results = str(RESULTS) if config.results == Config.results else config.results
    console.print(f"Each kernel@{labels[1]} ({second}) against the same kernel@{labels[0]} ({first}).", soft_wrap=True)
    return config


def _explain_none(
    revisions: tuple[str, str], device: str, same: list[str], missing: list[str], elsewhere: list[str]
) -> str:
    """Why no kernel is left to race, and what to do. `elsewhere`: kernels that differ and do not run on the device."""
    where, other = ("a GPU", "cpu") if device == "cuda" else ("a CPU", "cuda")
    first, second = revisions
    if elsewhere:
        return f"the run is on {where}, where the kernels that differ do not run: {', '.join(elsewhere)}; add device={other}"
    if same:
        return f"none differs between {first} and {second}; kernel=NAME races it anyway"
    if missing:
        return f"none is in both {first} and {second}; choose other revisions"
    return f"none has a file of its own and runs on {where}; add device={other}"


def _kernels(config: Config, op: Op) -> tuple[list[Kernel], str]:
    """The kernels of the request that have a source file of their own, and the kind of device that it is for."""
    device = executors.choose(config.cluster, config.container).find_device(config.device).kind
    wanted = names(config.kernel)
    if wanted != ["all"]:
        kernels = [op.kernels[choose(f"{op.name} kernel", name, op.kernels)] for name in wanted]
        if without := [kernel.name for kernel in kernels if kernel.backend in ("torch", "function")]:
            raise UserError(f"kernel {without[0]} is a function, and has no file of its own to race; choose another")
        return kernels, device
    return [kernel for kernel in op.kernels.values() if kernel.backend not in ("torch", "function")], device


def _label(revision: str) -> str:
    """The revision as it is part of a kernel's name."""
    return "tree" if revision == TREE else _git("rev-parse", "--short=9", f"{revision}^{{commit}}").strip()


def unpack(revision: str, target: Path) -> Path:
    """The revision's folder `minfer`, below `target`."""
    if revision == TREE:
        shutil.copytree(PACKAGE, target / "minfer", ignore=shutil.ignore_patterns("__pycache__"))
        return target / "minfer"
    target.mkdir(parents=True)
    command = ["git", "-C", str(PACKAGE.parent), "archive", "--format=tar", revision, "minfer"]
    packed = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(target, filter="data")
    return target / "minfer"


def _text(kernel: Kernel, tree: Path) -> str | None:
    """A kernel's source and headers in a tree; None where it is not there."""
    there = _in(tree, kernel)
    if not there.source.is_file():
        return None
    return "\n".join(path.read_text("utf-8", errors="replace") for path in there.sources())


def _in(tree: Path, kernel: Kernel) -> Kernel:
    source = tree / kernel.source.relative_to(PACKAGE)
    return Kernel(kernel.op, kernel.name, kernel.backend, source, root=tree)


def _rename(kernels: list[Kernel], label: str, tree: Path) -> None:
    """Give the torch op of each kernel the name of that revision: one process loads both. Triton kernels have none.

    Raises UserError where a file has no such op."""
    for kernel in kernels:
        if not kernel.needs_build:
            continue
        there = _in(tree, kernel)
        renamed = Kernel(kernel.op, f"{kernel.name}@{label}", kernel.backend, there.source).symbol
        text, count = re.subn(rf"\b{kernel.symbol}\b", renamed, there.source.read_text("utf-8"))
        if not count:
            raise UserError(f"{there.source} does not define {kernel.symbol}; leave {kernel.name} out with kernel=...")
        there.source.write_text(text, "utf-8")


def register(op: Op, kernels: list[Kernel], labels: list[str], folder: Path) -> Path:
    """The file that registers both revisions' kernels in every process of a run, where they are unpacked at
    folder/label/minfer: those of the second label with those of the first one as baselines. Raises UserError."""
    for label in labels:
        _rename(kernels, label, folder / label / "minfer")
    lines = [f'"""The kernels of two revisions of {op.name}, as `minfer race` unpacked them."""', ""]
    lines += ["from pathlib import Path", "", "from minfer.ops import get", ""]
    lines += [f"op, here = get({op.name!r}), Path(__file__).parent", f"for name in {[k.name for k in kernels]!r}:"]
    lines += [f"    op.revision(name, {labels[0]!r}, here / {labels[0]!r} / 'minfer')"]
    lines += [f"    op.revision(name, {labels[1]!r}, here / {labels[1]!r} / 'minfer', against=f'{{name}}@{labels[0]}')"]
    path = folder / "kernels.py"
    path.write_text("\n".join([*lines, ""]))
    return path


def _git(*words: str) -> str:
    """What git says; nothing where it fails."""
    try:
        command = ["git", "-C", str(PACKAGE.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
