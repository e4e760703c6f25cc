"""From a request to cases: what will be run, what is left out and why, and how it is split into shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from minfer import ops
from minfer.ops import DTYPES, Case, Kernel, Op, default, drawn
from minfer.ops.drawn import Problem
from minfer.plan.config import Config, UserError, choose, groups, names, shape_presets, written
from minfer.plan.counters import LIMITS, SETS
from minfer.plan.order import put_headline_first, put_headlines_first
from minfer.plan.statement import check_axes, rehearse
from minfer.plan.sweeps import RESOURCES, parts

BUILD_S = 15.0  # about what compiling one kernel takes


@dataclass(frozen=True)
class Plan:
    """What a request comes to. `unsupported` are cases too: they get a row that says why they were not run."""

    cases: list[Case]
    unsupported: dict[str, str]  # case key -> why
    left_out: dict[str, str]  # kernel -> why it is not in the matrix at all
    resources: dict[str, dict[str, Any]] = field(default_factory=dict)  # case key -> what its sweep's own jobs ask for
    found: set[str] = field(default_factory=set)  # keys of the cases whose rows are there already (resume=true)

    def seconds(self, config: Config, jobs: int = 1) -> float:
        """About how long it takes on `jobs` nodes at once, builds included."""
        timed = [case for case in self.cases if case.key not in self.unsupported and case.key not in self.found]
        builds = sum(ops.get(op).kernels[name].needs_build for op, name in {(case.op, case.kernel) for case in timed})
        return math.ceil(len(timed) / jobs) * config.timing.estimate() + (BUILD_S if builds else 0)


def plan(config: Config, device: str, capability: tuple[int, int] | None = None) -> Plan:
    """The cases of a request on a kind of device, "cuda" or "cpu". Raises UserError.

    The headline comes first (`minfer.plan.order`). The kernels of a problem come together, in ladder order, so that a table
    fills problem by problem. `capability` is the GPU's, where it is known already."""
    if not config.sweeps:
        return _plan_sweep(config, device, capability)
    whole, plans = Plan([], {}, {}), []
    for part in parts(config):
        each = _plan_sweep(part, device, capability)
        op = each.cases[0].op
        own = {key: value for key in RESOURCES if (value := getattr(part.cluster, key)) != getattr(config.cluster, key)}
        if device == "cpu":
            own.pop("gres", None)
        for case in each.cases:  # a case of two sweeps runs with what the first of them asks for
            whole.resources.setdefault(case.key, own)
        plans.append(each)
        whole.unsupported.update(each.unsupported)
        whole.left_out.update({f"{op}/{kernel}": why for kernel, why in each.left_out.items()})
    ordered = put_headlines_first([each.cases for each in plans])
    whole.cases[:] = {case.key: case for case in ordered}.values()  # two sweeps of an op may share some
    for case in whole.cases:  # a kernel may be left out of one sweep of an op and run in another
        whole.left_out.pop(f"{case.op}/{case.kernel}", None)
    return whole


def _plan_sweep(config: Config, device: str, capability: tuple[int, int] | None) -> Plan:
    op = ops.get(choose("op", config.op, ops.names()))
    check_axes(op)
    static = config.profiler.static
    for arch in static.archs if static else ():
        choose("architecture", arch, LIMITS)
    if ncu := config.profiler.ncu:
        for name in ncu.sets:
            choose("set of counters", name, SETS)
        choose("profiler.ncu.clock_control", ncu.clock_control, ("none", "base"))
    wanted = _names("kernel", config.kernel)
    without = op.drawn_without if config.draw.problems and wanted == ["functions"] else {}
    kernels, left_out = _choose_kernels(op, wanted, device, static is not None, without)
    if config.beside and (config.beside not in kernels or not config.untrusted):
        raise UserError(
            f"beside={config.beside} needs untrusted=true, and {config.beside} among the kernels of the request; add what is"
            " missing"
        )
    problems = _draw(op, config, device) if config.draw.problems else _chosen_problems(op, config, device)
    cases = [op.case(kernel, of.dtype, of.shape, of.params) for of, kernel in itertools.product(problems, kernels)]
    if wanted in (["all"], ["functions"]):  # leave out kernels for other parameters without an error
        fitting = {case.kernel for case in cases if op.kernels[case.kernel].takes(case) is None}
        left_out |= {c.kernel: op.kernels[c.kernel].takes(c) or "" for c in cases if c.kernel not in fitting}
        cases = [case for case in cases if case.kernel in fitting]
    rehearse(op, cases)
    unsupported = {}
    for case in cases:
        kernel = op.kernels[case.kernel]
        if why := kernel.elsewhere(device) or _why_unsupported(kernel, case, capability):
            unsupported[case.key] = why
    readable = static and any(
        _is_readable(op.kernels[c.kernel]) and not _why_unsupported(op.kernels[c.kernel], c, None) for c in cases
    )
    if len(unsupported) == len(cases) and not readable:
        left = left_out or {op.name: "has no kernels"}
        key, why = next(iter((unsupported or left).items()))
        raise UserError(f"nothing to run: {key} {why}")
    if not config.draw.problems:  # none of the drawn problems stands for the op
        cases = put_headline_first(op, cases, unsupported, wanted == ["all"])
    return Plan(cases, unsupported, left_out)


def _why_unsupported(kernel: Kernel, case: Case, capability: tuple[int, int] | None) -> str | None:
    """Why a kernel cannot run a case, as half a sentence, or None. Raises UserError if the rule of its author fails."""
    try:
        return kernel.unsupported(case, capability)
    except Exception as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"requires= of kernel {kernel.name} fails at {case.problem}: {type(error).__name__}: {said}"
        ) from error


def _draw(op: Op, config: Config, device: str) -> list[Problem]:
    if op.drawn is None:
        having = [name for name in ops.names() if ops.get(name).drawn]
        raise UserError(
            f"draw.problems needs an op that says how to draw problems, and {op.name} does not; choose {' or '.join(having)}"
        )
    found = drawn.problems(op.name, op.drawn, config.draw.problems, config.draw.seed, device)
    return [problem for number, problem in enumerate(found) if not config.draw.only or number in config.draw.only]


def _names(key: str, value: Any) -> list[str]:
    """The names that a key of the request gives, at least one."""
    if found := names(value):
        return found
    raise UserError(f"{key} is empty; give a name or a list of names, or leave the key out")


def _chosen_problems(op: Op, config: Config, device: str) -> list[Problem]:
    """Every combination of the request's dtypes, parameters and shapes."""
    dtypes = [choose("dtype", dtype, DTYPES) for dtype in dict.fromkeys(_names("dtype", config.dtype))]
    params = _combine_params(op, config.params)
    if config.shape.op and config.shape.op != op.name:
        presets = [name for name, of in shape_presets().items() if of in (op.name, "")]
        which = f"choose one of its own: {', '.join(presets)}" if presets else "choose shape=custom"
        raise UserError(f"shape={config.shape.name} has shapes of {config.shape.op}, not of {op.name}; {which}")
    key = "gpu" if device == "cuda" else "cpu"
    shapes = _expand_shapes(op, getattr(config.shape, key), _name_shapes(config, key), key)
    return [Problem(dtype, shape, of) for dtype, of, shape in itertools.product(dtypes, params, shapes)]


def _choose_kernels(
    op: Op, wanted: list[str], device: str, static: bool, without: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The kernels to run, and why others are not run. "all" are all except minfer's functions; "functions" are these functions,
    and the implementations that are not minfer's. A kernel that was asked for by name must be able to run.

    `static`: CUDA kernels stay in, because their machine code can be read where they cannot run. Those of `without` are left
    out."""
    everything = wanted in (["all"], ["functions"])
    backends = ("torch", "function") if wanted == ["functions"] else ("torch", "cuda", "triton", "cpp")
    ladder = [name for name, kernel in op.kernels.items() if kernel.backend in backends]
    if wanted == ["functions"] and all(op.kernels[name].backend != "function" for name in ladder):
        raise UserError(
            f"kernel=functions is for ops with a function that can be timed, and {op.name} has none; use all"
        )
    chosen = ladder if everything else [choose(f"{op.name} kernel", name, op.kernels) for name in wanted]
    left_out = {}
    for name in chosen:
        if (why := op.kernels[name].elsewhere(device)) and not (static and _is_readable(op.kernels[name])):
            left_out[name] = why
        elif name in without:
            left_out[name] = f"{without[name]}; to time it, name it in kernel="
    if left_out and not everything:
        name, why = next(iter(left_out.items()))
        here = [kernel.name for kernel in op.kernels.values() if device in kernel.devices]
        where = "there is none here" if device == "cpu" else "this run is on a GPU"
        raise UserError(f"kernel {name} {why} and {where}; kernels for this device: {', '.join(here)}")
    return [name for name in dict.fromkeys(chosen) if name not in left_out], left_out


def _is_readable(kernel: Kernel) -> bool:
    """Whether profiler=static has machine code to read, without running the kernel."""
    return kernel.backend == "cuda"


def _combine_params(op: Op, wanted: dict[str, Any]) -> list[dict[str, str]]:
    """Every combination of the op's parameters that was asked for, and of its calls; the default where nothing was."""
    valid = {**op.params, "call": tuple(op.calls)}
    for name in wanted:
        choose(f"parameter of {op.name}", name, valid)
        if not names(wanted[name]):
            raise UserError(f"params.{name} is empty; give a name or a list of names, or leave the key out")
    values = []
    for name, allowed in valid.items():
        chosen = list(dict.fromkeys(names(wanted.get(name, default(allowed)))))
        for value in chosen:
            if isinstance(allowed, tuple):
                choose(name, value, allowed)
            elif why := allowed.check(value):
                raise UserError(f"{name}={value} is no distribution of lengths; it {why}")
        values.append(chosen)
    return [dict(zip(valid, combination, strict=True)) for combination in itertools.product(*values)]


def _name_shapes(config: Config, key: str) -> str:
    """What a complaint calls the shapes at a key of `shape`: the set that they are of, or the key if the user set it."""
    name = config.shape.name
    shown: Any = OmegaConf.to_container(written("shape", name)) if name in groups()["shape"] else {}
    return f"shape set {name!r}" if shown.get(key) == getattr(config.shape, key) else f"shape.{key}"


def _expand_shapes(op: Op, entries: list[Any], whose: str, key: str) -> list[dict[str, int]]:
    """The shapes of a set, its lists multiplied out, without repeats."""
    found, needed = [], {axis for axis, of in op.axes.items() if not of.default}
    for entry in entries:
        if not isinstance(entry, dict) or not needed <= set(entry) <= set(op.axes):
            given = ", ".join(map(str, entry)) if isinstance(entry, dict) else repr(entry)
            raise UserError(f"{whose} does not fit {op.name}: its axes are {', '.join(op.axes)}, not {given}")
        sizes = {axis: size if isinstance(size := entry[axis], list) else [size] for axis in op.axes if axis in entry}
        for axis, of_axis in sizes.items():
            for size in of_axis:
                if not isinstance(size, int) or isinstance(size, bool) or size < op.axes[axis].least:
                    whole = f"sizes are whole numbers from {op.axes[axis].least}"
                    raise UserError(f"{whose}: {axis}={size!r} is not a size; {whole}")
        found += [dict(zip(sizes, combination, strict=True)) for combination in itertools.product(*sizes.values())]
    for shape in found:
        if why := op.wrong_shape(shape):
            raise UserError(f"{whose}: {why}; correct shape.{key}")
    if not found:
        raise UserError(f"{whose} has no shapes for this device; set shape.{key}")
    return [dict(items) for items in dict.fromkeys(tuple(op.without_defaults(shape).items()) for shape in found)]


def split(plan: Plan, config: Config, jobs: int) -> list[list[Case]]:
    """At most `jobs` shards, the longest of them as short as can be. Cases whose jobs ask for different resources are in
    different shards; where there are more kinds of these than `jobs`, each has one shard."""
    groups: dict[str, list[Case]] = {}
    for case in plan.cases:
        groups.setdefault(repr(plan.resources.get(case.key, {})), []).append(case)
    counts = dict.fromkeys(groups, 1)
    for _ in range(jobs - len(groups)):
        counts[max(groups, key=lambda kind: len(groups[kind]) / counts[kind])] += 1
    return [shard for kind, cases in groups.items() for shard in _split(cases, plan, config, counts[kind])]


def _split(whole: list[Case], plan: Plan, config: Config, jobs: int) -> list[list[Case]]:
    """At most `jobs` shards of some of the plan's cases.

    One keeps the plan's order. Several are filled kernel by kernel, because each shard compiles the kernels that it has
    cases of: there are at most as many builds as kernels and shards together."""
    if jobs == 1:
        return [whole]
    kernels: dict[tuple[str, str], list[tuple[Case, float]]] = {}
    for case in whole:
        seconds = 0.0 if plan.unsupported and case.key in plan.unsupported else config.timing.estimate()
        kernels.setdefault((case.op, case.kernel), []).append((case, seconds))
    build_s = {
        key: BUILD_S if ops.get(key[0]).kernels[key[1]].needs_build and any(s for _, s in cases) else 0.0
        for key, cases in kernels.items()
    }

    def fill(most_s: float) -> list[list[Case]]:
        shards: list[list[Case]] = [[]]
        spent = 0.0
        for key, cases in kernels.items():
            spent += build_s[key]
            for case, seconds in cases:
                if shards[-1] and spent + seconds > most_s:
                    shards.append([])
                    spent = build_s[key]
                shards[-1].append(case)
                spent += seconds
        return shards

    low, high = 0.0, sum(build_s.values()) + sum(seconds for cases in kernels.values() for _, seconds in cases)
    while high - low > 0.1:
        middle = (low + high) / 2
        low, high = (low, middle) if len(fill(middle)) <= jobs else (middle, high)
    return fill(high)
