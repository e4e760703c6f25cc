"""What the page of a kernel tells beside its rows: its source, what it takes of each architecture, what was counted."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from minfer.rows.store import Row

ROOT = Path(__file__).resolve().parents[2]
MOST_CASES = 3  # of each dtype and parameters, the largest ones, that counters are shown of
RESOURCES: tuple[str, ...] = (
    "registers",
    "shared_bytes",
    "dynamic_shared_bytes",
    "stack_bytes",
    "local_store_bytes",
    "local_load_bytes",
)
RESOURCES += ("max_threads", "occupancy_percent", "instructions")
COUNTERS = ("kernels", "dram_bytes", "dram_percent", "tensor_percent", "sm_percent", "l2_hit_percent", "sm_mhz")
BUSY, IDLE = 80.0, 50.0  # percent: a limit is near above the one, and all are far below the other
TWICE = 1.3  # times the least bytes, from which on bytes are read again
CONFLICTS = 0.1  # a shared-memory instruction


def facts(rows: list[Row], table: pa.Table) -> list[dict[str, Any]]:
    """Every kernel of the rows. `table` has their `metrics` and `functions`, found by a row's `place`."""
    kernels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kernels.setdefault((row["op"], row["kernel"]), []).append(row)
    sources = Sources()
    found = []
    for (op, kernel), of in kernels.items():
        profiled = _profiled(of, table)
        about = {"op": op, "kernel": kernel, "resources": _resources(profiled), "counters": _counters(profiled)}
        newest = max(of, key=lambda row: str(row["finished"] or ""))
        found.append(about | {"source": sources.of(op, kernel, newest["commit"])})
    return found


def _profiled(rows: list[Row], table: pa.Table) -> list[Row]:
    """The largest cases of each dtype, parameters and device, with what profilers found."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["metrics"]:
            groups.setdefault((row["device"], row["problem"].rpartition("/")[0]), []).append(row)
    chosen = []
    for group in groups.values():
        group.sort(key=lambda row: (row["flops"] or 0, row["bytes"] or 0), reverse=True)
        chosen += group[:MOST_CASES]
    places = pa.array([row["place"] for row in chosen], pa.int64())
    more = table.select(["metrics", "functions"]).take(places)
    named = zip(chosen, more.to_pylist(maps_as_pydicts="lossy"), strict=True)
    return [row | {name: value or {} for name, value in extra.items()} for row, extra in named]


def _resources(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """What `profiler=static` read of the machine code: a line for every device function and architecture."""
    lines: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        for scope, function in row["functions"].items():
            profiler, _, arch = scope.partition(".")
            if profiler != "static":
                continue
            arch = arch.partition(".")[0]
            values = {name: row["metrics"].get(f"{scope}.{name}") for name in RESOURCES}
            code = {
                name.removeprefix(f"{scope}."): value
                for name, value in row["metrics"].items()
                if name.startswith(f"{scope}.") and re.fullmatch(r"[A-Z][A-Z0-9_.]*", name.removeprefix(f"{scope}."))
            }
            most = dict(sorted(code.items(), key=lambda item: (-item[1], item[0]))[:12])
            lines.setdefault(
                (arch, function, str(values)), {"arch": arch, "function": function, "code": most, **values}
            )
    return [lines[key] for key in sorted(lines)]


def _counters(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """What `profiler=ncu` counted in one cold call, and what that says."""
    found = []
    for row in rows:
        counted = {
            name.removeprefix("ncu."): value for name, value in row["metrics"].items() if name.startswith("ncu.")
        }
        if counted:
            line = {"device": row["device"], "problem": row["problem"], "bytes": row["bytes"]}
            line["values"] = {name: counted[name] for name in (*COUNTERS, *sorted(counted)) if name in counted}
            found.append(line | {"says": says(counted, row["bytes"])})
    return found


def says(counted: Mapping[str, float], least_bytes: float | None) -> list[str]:
    """What counters mean, in sentences; docs/profiling.md has the whole list."""
    dram, tensor, sm = (counted.get(f"{name}_percent") for name in ("dram", "tensor", "sm"))
    said = []
    moved = counted.get("dram_bytes")
    if moved and least_bytes and moved > TWICE * least_bytes:
        said.append(
            f"Device memory moves {moved / least_bytes:.1f} times the least bytes: operands are read more than once."
        )
    if dram is not None and dram >= BUSY:
        said.append(f"Device memory is busy {dram:.0f} % of the time: memory bandwidth is the limit.")
    if tensor is not None and tensor >= BUSY:
        said.append(f"The tensor cores are busy {tensor:.0f} % of the time: arithmetic is the limit.")
    if dram is not None and tensor is not None and max(dram, tensor, sm or 0) < IDLE:
        said.append(
            "Memory, tensor cores and multiprocessors are all less than half busy: the kernel waits for latency."
        )
    loads = counted.get("shared_load_instructions")
    conflicts = counted.get("shared_load_conflicts")
    if loads and conflicts and conflicts / loads > CONFLICTS:
        said.append(f"Shared-memory loads have {conflicts / loads:.1f} bank conflicts an instruction.")
    stalls = {name.removeprefix("stall_"): value for name, value in counted.items() if name.startswith("stall_")}
    stalls.pop("selected", None)
    if stalls:
        reason = max(stalls, key=lambda name: stalls[name])
        said.append(
            f"Warps wait most for {reason.replace('_', ' ')} ({stalls[reason]:.1f} warps an issued instruction)."
        )
    return said


class Sources:
    """The files of kernels: as they were at a row's commit where this is a clone that has it, else as they are now."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.files: dict[str, list[str]] = {}  # by commit; "" stands for the files as they are

    def of(self, op: str, kernel: str, commit: str | None) -> dict[str, Any] | None:
        """Path, text, commit and included headers of a kernel's file; None where there is no such file."""
        kernel, _, revision = kernel.partition("@")  # as a race names it
        commit = revision if re.fullmatch("[0-9a-f]{7,40}", revision) else commit
        if not (op.isidentifier() and re.fullmatch(r"\w+", kernel)):
            return None  # an op from outside may be called anything
        at = (commit or "").rstrip("+")
        at = at if re.fullmatch("[0-9a-f]{7,40}", at) and self._listed(at) else ""
        path = self._find(op, kernel, at) or (self._find(op, kernel, "") if at else None)
        if path is None:
            return None
        text = self._read(path, at)
        if text is None:
            at, text = "", self._read(path, "")
        if text is None:
            return None
        changed = bool(at and (commit or "").endswith("+"))
        headers = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE)
        return {"path": path, "text": text, "commit": at, "changed": changed, "headers": headers}

    def _find(self, op: str, kernel: str, commit: str) -> str | None:
        """The file with a kernel's name; else one that names it, such as the op's own file for a PyTorch function."""
        folder = f"minfer/ops/{op}/"
        files = [path for path in self._listed(commit) if path.startswith(folder)]
        named = [path for path in files if Path(path).stem == kernel and Path(path).suffix in (".cu", ".cpp", ".py")]
        if named:
            return named[0]
        for path in files:
            text = self._read(path, commit) or ""
            if re.search(rf"\bMINFER_\w+\({op}_{kernel}\b", text) or f'op.torch("{kernel}"' in text:
                return path
        return None

    def _listed(self, commit: str) -> list[str]:
        if commit not in self.files:
            if commit:
                listed = self._git("ls-tree", "-r", "--name-only", commit, "minfer/ops")
                self.files[commit] = (listed or "").splitlines()
            else:
                found = (
                    path for path in (self.root / "minfer" / "ops").rglob("*.*") if "__pycache__" not in path.parts
                )
                self.files[commit] = sorted(path.relative_to(self.root).as_posix() for path in found if path.is_file())
        return self.files[commit]

    def _read(self, path: str, commit: str) -> str | None:
        if commit:
            return self._git("show", f"{commit}:{path}")
        try:
            return (self.root / path).read_text("utf-8", errors="replace")
        except OSError:
            return None

    def _git(self, *words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(self.root), *words], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.decode("utf-8", errors="replace")
