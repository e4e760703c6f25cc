"""What the launcher shows before its jobs run and at their end: the plan, and the table."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from minfer.bench.timing import Timing
from minfer.ops import Case
from minfer.plan import shell
from minfer.plan.cases import Plan
from minfer.plan.config import Config
from minfer.plan.counters import TENSOR
from minfer.rows import store
from minfer.rows.select import is_judged
from minfer.run import by_node, failures, times
from minfer.run.progress import RunProgress, format_time

MOST_CASES = 60  # that dry_run lists one by one
FOUND = "in the results already"
# Of the rows that are shown.
COLUMNS = ["run", "case", "op", "kernel", "dtype", "params", "shape", "status", "message", "device", "finished", "cold_us",
           "metric", "cold_rate", "cold_speedup", "cold_speedup_low", "cold_speedup_high", "cold_verdict", "baseline",
           "cold_baseline_us", "flags",
           "cold_percent_of_peak", "node", "steady_us", "steady_rate",
           "bytes", "cold_rounds", "metrics", "functions", "profilers", "guarantee",
           "judged_us", "judged_rate", "judged_speedup", "judged_speedup_low", "judged_speedup_high", "judged_verdict",
           "judged_baseline_us"]  # fmt: skip


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `launch.exit_status`: Rich would exit with 1, which says that cases have no row."""
        raise  # what Rich has caught


def console() -> Console:
    """Where all this is shown. A log has no width, and the table needs this much."""
    shown = _Console(highlight=False, markup=False)
    return shown if shown.is_terminal else _Console(highlight=False, markup=False, width=160)


def print_plan(
    console: Console, config: Config, plan: Plan, shards: list[list[Case]], executor: str, device: str
) -> None:
    """Print the plan of `dry_run=true`: every case, or if there are more than `MOST_CASES`, every kernel with the number of its
    shapes; what is left out and why; and about how long the run takes."""
    table = Table(title=f"{_size(plan)}, {count(len(shards), 'shard')}", title_justify="left")
    for column in ("op", "kernel", "dtype", "parameters", "shape", "shard", ""):
        table.add_column(column)
    lines: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for index, cases in enumerate(shards):
        for case in cases:
            params = ", ".join(f"{k}={v}" for k, v in case.params.items())
            why = plan.unsupported.get(case.key)
            said = FOUND if case.key in plan.found else f"not run: {why}" if why else ""
            whose = case.op, case.kernel, case.dtype, params, said
            key = whose if len(plan.cases) > MOST_CASES else (*whose, case.shape_name, str(index))
            lines.setdefault(key, []).append((case.shape_name, index))
    for (op, kernel, dtype, params, why, *_), of in lines.items():
        shapes = of[0][0] if len(of) == 1 else f"{len(of)} shapes"
        table.add_row(op, kernel, dtype, params, shapes, ", ".join(sorted({str(index) for _, index in of})), why)
    console.print(table)
    for line in _list_left_out(plan):
        console.print(line)
    if len(plan.found) == len(plan.cases):
        console.print(f"Would run nothing: all rows are {FOUND} (resume=true).")
        return
    at_once, length = _length(config, plan, shards)
    where = f", {at_once} jobs at once," if at_once > 1 else ","
    console.print(
        f"Would run on {device} through the {executor} executor{where} about {length}. Nothing was started (dry_run=true)."
    )


def print_size(console: Console, config: Config, plan: Plan, shards: list[list[Case]]) -> None:
    """Print how many cases a launch has and how long they take, before anything is built."""
    console.print(f"{_size(plan)}, about {_length(config, plan, shards)[1]}.", soft_wrap=True)


def _size(plan: Plan) -> str:
    of = ", ".join(dict.fromkeys(case.op for case in plan.cases))
    found = f", {len(plan.found)} of them {FOUND} (resume=true)" if plan.found else ""
    return f"{len(plan.cases)} cases of {of}{found}"


def _length(config: Config, plan: Plan, shards: list[list[Case]]) -> tuple[int, str]:
    """How many jobs run at once, and how long they take together."""
    at_once = min(len(shards), config.cluster.parallel)
    return at_once, format_time(plan.seconds(config, at_once))


def count(number: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def drop_value(message: str) -> str:
    """A reason of `Kernel.unsupported` without the value that was refused, so that the cases of a reason share a line. What
    an op's or a user's `requires` says stays as it is."""
    return re.sub(r"^(supports [^;]+), not \S+$", r"\1", message)


def has_too_few_rounds(row: store.Row) -> bool:
    """Whether a row is unconverged only because its interval is wider than was asked for; a judge has other reasons, too."""
    message = str(row["message"] or "after")
    return row["status"] == "unconverged" and message.startswith("after") and "the judge" not in message


def print_summary(console: Console, progress: RunProgress, plan: Plan) -> bool:
    """The table of a run and what to do next; returns whether every case has a row."""
    wanted = {case.key: index for index, case in enumerate(plan.cases)}
    run = progress.run
    rows = run.rows(COLUMNS)
    nodes = [shard.pinned for shard in progress.shards.values() if shard.pinned]
    shown = rows
    if rows:
        rows = dict(sorted(rows.items(), key=lambda item: wanted.get(item[0][1], 0)))
        shown = by_node.pick_median_rows(rows) if nodes else rows
        where = ", each case on the median node" if nodes else ""
        _print_times(console, f"{run.name}: ", list(shown.values()), where)
    if nodes:
        console.print(by_node.tabulate(run.name, by_node.compare(rows.values(), nodes)))
    _print_reasons(console, list(rows.values()), name_nodes=bool(nodes))
    counts = Counter(row["status"] for row in rows.values())
    if counts:
        console.print(
            f"{len(rows)} of {max(len(wanted), len(progress.cases))} cases: "
            + ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
        )
    look = {case for shard in progress.shards.values() for case in shard.first}
    if wide := [row for row in rows.values() if has_too_few_rounds(row) and row["case"] not in look]:
        console.print(_explain_unconverged(wide, run.request.timing), soft_wrap=True)
    flags = Counter(flag for row in rows.values() for flag in (row["flags"] or "").split("; ") if flag)
    for flag, n in flags.items():
        console.print(f"Note: {n} of {len(rows)} cases: {flag}.", soft_wrap=True)
    skipped = progress.skipped.keys()
    if skipped:
        console.print(f"{len(skipped)} of {len(wanted)} cases were in the results already (resume=true).")
    for line in _list_left_out(plan):
        console.print(line)
    for warning in dict.fromkeys(shard.warning for shard in progress.shards.values() if shard.warning):
        console.print(f"Note: {warning}.", soft_wrap=True)
    reasons = progress.reasons()
    for failure in failures.collect(progress):
        console.print(failures.describe(failure, reasons), soft_wrap=True)
    if rows:
        _print_files(console, run.row_files)
    redo = sum(len(shard.redo) for shard in progress.shards.values())
    if redo:
        console.print(f"{redo} of these cases are still to be done again; their rows above are the old ones.")
    if progress.first:
        console.print(
            f"{progress.first} of these cases have cold times only, of a first pass, and are still to be timed in full."
        )
    return not redo and not progress.first and set(wanted) <= {case for _, case in rows} | skipped


def print_found(console: Console, rows: list[store.Row], files: list[Path]) -> None:
    """The table of rows that were in these files before, where a launch with resume=true has nothing to do."""
    _print_times(console, "", rows)
    _print_reasons(console, rows, name_nodes=False)
    console.print(f"All {count(len(rows), 'case')} were in the results already (resume=true); nothing was started.")
    _print_files(console, files)


def _print_times(console: Console, name: str, rows: list[store.Row], where: str = "") -> None:
    """A table for each op and device, and what was counted. Judged rows have a table of their own."""
    kind = lambda row: (row["op"], row["device"], is_judged(row))
    for op, device, judged in dict.fromkeys(map(kind, rows)):
        of = [row for row in rows if kind(row) == (op, device, judged)]
        if any(row["status"] != "unsupported" for row in of):
            console.print(times.tabulate(f"{name}{op} on {device}{where}", of, console.width))
            for line in times.list_notes(of):
                console.print(line, soft_wrap=True)
    for table in (_tabulate_counters(rows), _tabulate_static(rows)):
        if table:
            console.print(table)


def _print_reasons(console: Console, rows: list[store.Row], name_nodes: bool) -> None:
    """Why rows have no times or no counters."""
    for (kernel, message), n in Counter(
        (row["kernel"], drop_value(row["message"])) for row in rows if row["status"] == "unsupported"
    ).items():
        console.print(f"{kernel}: {n} unsupported: {message}")
    for line in _list_problems(rows, name_nodes):
        console.print(line)
    for line in _list_unprofiled(rows):
        console.print(line)


def _print_files(console: Console, files: list[Path]) -> None:
    """Where the rows are, and what to do next."""
    for path in files:
        console.print(f"Rows: {shell.relative(path)}", soft_wrap=True)
    console.print(f"Next: {_report_command(sorted({path.parent for path in files}))}", soft_wrap=True)


def _explain_unconverged(rows: list[store.Row], timing: Timing) -> str:
    """Explains `has_too_few_rounds`, and says what would give these rows more rounds, unless the run had that already."""
    which = ", of the times inside of its process," if all(map(is_judged, rows)) else ""
    said = f"unconverged: the ratio's interval{which} is wider than was asked for, and than what the clock resolves"
    if all((row["cold_rounds"] or 0) >= timing.looks[-1] for row in rows):
        return f"{said}; minfer takes at most {timing.looks[-1]} rounds, so run it again when the machine is less busy."
    if all(store.SLOW in (row["flags"] or "") for row in rows):
        return f"{said}; a kernel that takes long gets few rounds."
    remedy = f"timing.cold_cap_s={max(10, math.ceil(3 * timing.cold_cap_s))}"
    return f"{said}; {'' if timing.name == 'default' else 'timing=default or '}{remedy} gives each case more rounds."


def _list_problems(rows: Iterable[store.Row], name_nodes: bool) -> list[str]:
    """The messages of rows that are not ok: a line for each row, or one with a count if several cases of a kernel have the
    same message."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row["status"] not in ("ok", "unsupported") and not has_too_few_rounds(row):
            where = f"{row['node']}: " if name_nodes else ""
            about = where, f"{row['op']}/{row['kernel']}", row["status"], row["message"] or ""
            groups.setdefault(about, []).append(row["case"])
    return [
        f"{where}{cases[0]}: {status}: {message}"
        if len(cases) == 1
        else f"{where}{kernel}: {len(cases)} cases {status}: {message} (the first is {cases[0]})"
        for (where, kernel, status, message), cases in groups.items()
    ]


def _report_command(folders: list[Path]) -> str:
    """The command that shows these rows."""
    page = "results/report.html" if shell.in_docker() else "report.html"  # on the mount
    words = [*(str(shell.relative(folder)) for folder in folders), *(["-o", page] if shell.in_docker() else [])]
    return f"{shell.command('report', *words)}   # these rows as a page to look into: {page}"


def _list_left_out(plan: Plan) -> list[str]:
    """The kernels that are not part of the matrix, a line a reason."""
    reasons: dict[str, list[str]] = {}
    for kernel, why in plan.left_out.items():
        reasons.setdefault(why, []).append(kernel)
    return [f"Left out: {', '.join(kernels)}: {why}." for why, kernels in reasons.items()]


# What to show of a kernel's instructions, in this order; the rest is in the rows.
SHOWN = (*TENSOR, "FFMA", "UTMALDG", "LDGSTS", "LDG", "LDSM", "LDS", "STS", "STG", "LD", "BAR")


def _tabulate_static(rows: list[store.Row]) -> Table | None:
    """What the machine code says (`profiler=static`): a line for every device function and architecture."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        for scope, function in (row["functions"] or {}).items():
            profiler, arch = scope.split(".", 1)
            if profiler == "static":
                metrics = {
                    k.removeprefix(scope + "."): v for k, v in row["metrics"].items() if k.startswith(scope + ".")
                }
                found[row["kernel"], function, arch] = metrics
    if not found:
        return None
    table = Table(title="Machine code, by profiler=static", title_justify="left")
    for name in ("kernel", "function", "arch"):
        table.add_column(name, no_wrap=name != "function")
    for name in ("threads", "regs", "shared B", "stack B", "spills B", "occupancy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("instructions")
    for (kernel, function, arch), m in sorted(found.items(), key=lambda item: (item[0][0], item[0][2], item[0][1])):
        bound = m.get("max_threads")
        spills = f"{m['local_store_bytes']:g}+{m['local_load_bytes']:g}" if m["local_store_bytes"] else "0"
        table.add_row(
            kernel, _shorten(function), arch, f"{bound:g}" if bound else "", f"{m['registers']:g}",
            f"{m['shared_bytes'] + m.get('dynamic_shared_bytes', 0):,.0f}", f"{m['stack_bytes']:g}", spills,
            f"{m['occupancy_percent']:.0f} %" if bound else "", _list_instructions(m),
        )  # fmt: skip
    return table


def _tabulate_counters(rows: list[store.Row]) -> Table | None:
    """What the hardware counted (`profiler=ncu`), where it counted what says which limit a case is at."""
    wanted = ("dram_bytes", "dram_percent", "tensor_percent", "l2_hit_percent", "sm_mhz")
    table = Table(title="Counters of one cold call, by profiler=ncu", title_justify="left")
    for name in times.LABELS:
        table.add_column(name, no_wrap=True)
    for name in ("kernels", "DRAM MB", "of least", "DRAM %", "tensor %", "L2 hit %", "SM MHz"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        m = {name.removeprefix("ncu."): float(value) for name, value in (row["metrics"] or {}).items()}
        if not m.keys() >= {*wanted}:
            continue
        table.add_row(
            *times.label(row), f"{m['kernels']:g}",
            f"{m['dram_bytes'] / 1e6:,.1f}", f"{m['dram_bytes'] / row['bytes']:.2f}×",
            *(f"{m[name]:.1f}" for name in wanted[1:4]), f"{m['sm_mhz']:,.0f}",
        )  # fmt: skip
    return table if table.row_count else None


def _shorten(function: str) -> str:
    """A demangled function without its result, namespaces and parameters."""
    name = re.sub(r"\w+::", "", function.replace("(anonymous namespace)::", "").removeprefix("void "))
    return re.sub(r"(>|^\w+)\(.*\)$", r"\1", name)


def _list_instructions(metrics: dict[str, float]) -> str:
    shown = [name for root in SHOWN for name in sorted(metrics) if name.split(".")[0] == root]
    return ", ".join([f"{metrics['instructions']:g} in all", *(f"{metrics[name]:g} {name}" for name in shown)])


def _list_unprofiled(rows: list[store.Row]) -> list[str]:
    """What profilers did not find, and why: one line a reason."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for profiler, why in (row["profilers"] or {}).items():
            if why != "ok":
                reasons.setdefault((profiler, why), {})[row["kernel"]] = None
    return [f"{profiler}: {', '.join(kernels)}: {why}" for (profiler, why), kernels in reasons.items()]
