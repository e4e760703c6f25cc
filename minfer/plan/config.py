"""The types of `conf/`, its options, and which values no run could mean."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from omegaconf import MISSING, OmegaConf

from minfer.bench.timing import Timing
from minfer.shapes import named_sets

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = (PACKAGE / "conf").is_dir()  # as a wheel has it; else this is a clone
CONF = (PACKAGE if INSTALLED else PACKAGE.parent) / "conf"


SCRIPT = "script"  # of dry_run
DEVICES = ("auto", "cuda", "cpu")


class UserError(Exception):
    """A request that cannot be met: one sentence that says what, which value, and what to do. A command that it ends has the
    exit status `status`."""

    status = 2


class NoAnswer(UserError):
    """SLURM does not answer, so the state of the jobs is unknown."""

    status = 3


class MaybeQueued(NoAnswer):
    """SLURM did not answer when jobs were submitted, so that they may be queued."""


@dataclass
class Shape:
    """Sizes to run. An entry maps each axis to a size or a list of sizes, and stands for all their combinations."""

    name: str = MISSING
    op: str = ""  # the op that these are shapes of; empty: of any with these axes
    gpu: list[Any] = field(default_factory=list)
    cpu: list[Any] = field(default_factory=list)


@dataclass
class Static:
    """Registers, shared memory, spills, occupancy and instructions from the machine code, for these architectures."""

    archs: list[str] = field(default_factory=lambda: ["sm_89", "sm_90a"])


@dataclass
class Torch:
    """PyTorch's profiler over so many calls of a case: operators, kernels, the host's share, a Chrome trace."""

    calls: int = 3


@dataclass
class Proton:
    """Triton's profiler over so many calls of a case; `instrument` also traces the scopes inside Triton kernels."""

    calls: int = 10
    instrument: bool = False


@dataclass
class Ncu:
    """Hardware counters, by Nsight Compute; `minfer.plan.counters` has the sets."""

    sets: list[str] = field(default_factory=lambda: ["roofline"])
    clock_control: str = "none"  # none or base: whether ncu locks the GPU to its base clock


@dataclass
class Profiler:
    """Profilers to run after the timings, in this order; a section that is null was not chosen."""

    auto: bool = False  # static and ncu where there is a GPU
    static: Static | None = None
    ncu: Ncu | None = None
    torch: Torch | None = None
    proton: Proton | None = None

    def options(self) -> dict[str, dict[str, Any]]:
        """The options of each profiler to run."""
        return {name: options for name, options in dataclasses.asdict(self).items() if isinstance(options, dict)}

    def resolve(self, device: str) -> None:
        """Choose what `auto` stands for on a kind of device."""
        if self.auto and device == "cuda":
            self.static, self.ncu = self.static or Static(), self.ncu or Ncu()


@dataclass
class Cluster:
    """Where jobs run. Unset fields are left to the site's defaults."""

    name: str = MISSING
    executor: str = "auto"  # local, slurm, or auto: slurm where sbatch is on the PATH
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None  # such as gpu:l40s:1; a job runs a shard on each of its GPUs
    cpus: int | None = None
    memory_gb: int | None = None
    time_min: int | None = None
    grace_s: int = 90  # so long before the time limit a job stops after the case that it is at, and is queued again
    exclusive: bool = False  # whether a job gets its node for itself
    flags: dict[str, Any] = field(default_factory=dict)  # further options of sbatch, such as {reservation: weekly}
    max_jobs: int = 1  # jobs to split the matrix into; without SLURM, at most one for each GPU
    parallel: int = 256  # of which so many may run at once
    scratch: str | None = None  # node-local folder for builds and caches; $SLURM_TMPDIR wins
    setup: list[str] = field(default_factory=list)  # shell lines to run first on the node
    retries: int = (
        0  # how often a job that ends at its time or memory limit is submitted again, each time with twice as much
    )
    avoid: str | None = None  # auto: shards that are submitted again leave out a node on which all jobs failed at once
    distribute: Any = False  # true: the whole matrix on every node of the partition, a job each; or a list of nodes


@dataclass
class Container:
    """The container that jobs run in."""

    name: str = "none"
    image: str | None = None  # an Apptainer image (.sif) or sandbox folder; none: run on the host
    binds: list[str] = field(default_factory=list)  # further folders to make visible, as in apptainer --bind


@dataclass
class Draw:
    """Problems that are drawn at random (`minfer/ops/drawn.py`) and replace the request's dtype, params and shape."""

    problems: int = 0  # of each op; 0: none are drawn
    seed: int = 1
    only: list[int] = field(default_factory=list)  # numbers of the problems that are run, from 0; empty: all


@dataclass
class Verify:
    """What a run looks for besides wrong results."""

    memcheck: bool = False  # run each kernel once under compute-sanitizer, after the timings, on small and odd shapes


@dataclass
class Config:
    """A request. `kernel`, `dtype` and the values of `params` are a name or a list of names. kernel may be "all": all of the
    op's kernels except minfer's functions; or "functions": these functions, and the implementations that are not minfer's.

    Where `sweeps` names some, the request is for all of these: op, kernel, dtype, params and shape are theirs. An
    entry is a sweep's name, or a mapping with that name at `sweep` and what replaces the sweep's own (`minfer.plan.sweeps`)."""

    sweeps: list[Any] = field(default_factory=list)
    op: str = MISSING
    kernel: Any = "all"
    dtype: Any = MISSING
    params: dict[str, Any] = field(default_factory=dict)
    shape: Shape = field(default_factory=Shape)
    draw: Draw = field(default_factory=Draw)
    timing: Timing = field(default_factory=Timing)
    profiler: Profiler = field(default_factory=Profiler)
    verify: Verify = field(default_factory=Verify)
    cluster: Cluster = field(default_factory=Cluster)
    container: Container = field(default_factory=Container)
    device: str = "auto"  # cuda, cpu, or auto: cuda where there is a GPU
    results: str = "results"
    runs: str = "runs"  # logs, progress and the resolved config of each run
    extra: list[str] = field(default_factory=list)  # Python files to import first; they may register kernels
    case_timeout_s: float = 180.0
    build_timeout_s: float = 600.0
    dry_run: Any = False  # true: show the plan and start nothing; script: show what sbatch would be given
    notify: str | None = None  # a shell command to run, or a URL to post to, when the launcher has seen the run's end
    wait: bool = True  # follow the jobs and show the table; false: return when they are submitted
    resume: bool = False
    untrusted: bool = False  # judge each kernel from another process, too, which takes some seconds a case
    beside: str = ""  # with untrusted=true: a kernel that the judge times in the same rounds as each of the others

    def list_profilers(self) -> dict[str, dict[str, Any]]:
        """What looks at the cases after the timings, each with its options."""
        return self.profiler.options() | ({"memcheck": {}} if self.verify.memcheck else {})


def register() -> None:
    """Register with Hydra the types (the schema that `conf/config.yaml` starts from) and the ops' sets of shapes. A user's
    file with the name of a set replaces it."""
    store: Any = ConfigStore.instance()
    if "shape" in store.repo:  # once a process
        return
    store.__deepcopy__ = lambda memo: store  # Hydra would copy it twice at each launch, and nothing changes it
    # Hydra would compose each configuration of --multirun twice, to find mistakes before it runs the first one. We run none
    # before all are composed.
    setattr(Sweeper, "validate_batch_is_legal", lambda sweeper, batch: None)  # noqa: B010  # no attribute to mypy
    store.store(name="schema", node=Config)
    for name, content in named_sets().items():
        if not _file("shape", name):
            store.store(group="shape", name=name, node=content)


def groups() -> dict[str, list[str]]:
    """The config groups and their options, the user's among them."""
    found: dict[str, list[str]] = {"shape": list(named_sets())}
    for path in sorted(path for folder in _folders() for path in folder.glob("*/*.yaml")):
        found.setdefault(path.parent.name, []).append(path.stem)
    return {group: sorted(set(options)) for group, options in sorted(found.items())}


def _folders() -> list[Path]:
    """Where options of groups are looked for, the first one first: in `conf/`, and in the folder that `--config-dir` adds."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path, nargs="?")
    added = parser.parse_known_args(sys.argv[1:])[0].config_dir
    return [CONF, added] if added else [CONF]


def shape_presets() -> dict[str, str]:
    """The options of the group `shape`, each with its op; empty for a preset of no op."""
    return {name: str(OmegaConf.select(written("shape", name), "op") or "") for name in groups()["shape"]}


def written(group: str, option: str) -> Any:
    """The content of an option. Raises UserError if there is none of this name."""
    if file := _file(group, option):
        return OmegaConf.load(file)
    choose(group, option, groups()[group])  # else it is a set of shapes from an op
    return OmegaConf.create(named_sets()[option])


def _file(group: str, option: str) -> Path | None:
    return next((path for folder in _folders() if (path := folder / group / f"{option}.yaml").is_file()), None)


def names(value: Any) -> list[str]:
    """A name or a list of names, as a list."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_object(value)
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else [str(value)]


def choose(what: str, wanted: str, valid: Iterable[str]) -> str:
    """`wanted` if it is valid; else a UserError that names the nearest valid ones."""
    valid = list(valid)
    if wanted in valid:
        return wanted
    raise UserError(f"unknown {what} {wanted!r}; {nearest(wanted, valid)}")


def nearest(wanted: str, valid: Iterable[str], before: str = "") -> str:
    """`did you mean a or b?`, or all the valid ones where none is near; `before` stands before each of them."""
    valid = list(valid)
    close = [before + word for word in difflib.get_close_matches(wanted, valid, n=3, cutoff=0.55)]
    return f"did you mean {' or '.join(close)}?" if close else f"valid: {', '.join(before + word for word in valid)}"


def check_values(config: Config) -> None:
    """Raise UserError for a value that no run could mean."""
    looks, timing, cluster = config.timing.looks, config.timing, config.cluster
    if not looks or looks[0] < 1 or any(a >= b for a, b in itertools.pairwise(looks)):
        raise UserError(f"timing.looks is {looks}; it takes rising numbers of rounds from 1, such as [30,60,120]")
    for key, value, least in (
        ("timing.warmup_s", timing.warmup_s, 0),
        ("timing.cold_cap_s", timing.cold_cap_s, 0),
        ("timing.steady_block_s", timing.block_s, 0),
        ("timing.least_rounds", timing.least_rounds, 1),
        *(
            (f"cluster.{key}", value, 1)
            for key in ("cpus", "memory_gb", "time_min")
            if (value := getattr(cluster, key)) is not None
        ),
        ("draw.problems", config.draw.problems, 0),
        ("cluster.grace_s", cluster.grace_s, 1),
        ("cluster.max_jobs", cluster.max_jobs, 1),
        ("cluster.parallel", cluster.parallel, 1),
        ("cluster.retries", cluster.retries, 0),
        *(
            (f"profiler.{name}.calls", options["calls"], 1)
            for name, options in config.profiler.options().items()
            if "calls" in options
        ),
    ):
        if not (math.isfinite(value) and value >= least):
            raise UserError(f"{key} is {value}; it takes a number from {least}")
    if cluster.retries and cluster.time_min is None and cluster.memory_gb is None:
        raise UserError("cluster.retries doubles cluster.time_min and cluster.memory_gb, and neither is set; set one")
    check_words(cluster)
    choose("device", config.device, DEVICES)
    for key, folder in (("results", config.results), ("runs", config.runs)):
        if not folder.strip():
            raise UserError(f"{key} is empty; it takes a folder, such as {key}={key}")
    if config.dry_run not in (False, True, SCRIPT):
        raise UserError(f"dry_run is {config.dry_run}; it can be true, false or {SCRIPT}")
    _check_nodes(config)
    for key, value in (
        ("timing.precision", timing.target),
        ("case_timeout_s", config.case_timeout_s),
        ("build_timeout_s", config.build_timeout_s),
    ):
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{key} is {value}; it takes a number above 0")


def _check_nodes(config: Config) -> None:
    """Raise UserError if keys that choose nodes have wrong values or contradict each other."""
    nodes = config.cluster.distribute
    if config.cluster.avoid not in (None, "auto"):
        raise UserError(
            f"cluster.avoid is {config.cluster.avoid!r}; it takes auto, and cluster.flags.exclude takes the names of nodes"
        )
    if not isinstance(nodes, bool) and not (
        isinstance(nodes, list) and nodes and all(isinstance(n, str) for n in nodes)
    ):
        raise UserError(f"cluster.distribute is {nodes!r}; it takes true, or a list of nodes such as [node01,node02]")
    if nodes and config.resume:
        raise UserError(
            "resume=true skips a case that any node has finished, and cluster.distribute times each case on several nodes;"
            " leave one of them out"
        )
    if nodes and "nodelist" in config.cluster.flags:
        raise UserError("cluster.flags has nodelist, and cluster.distribute chooses the nodes; name them there")


def name_changes(timing: Timing) -> Timing:
    """The same with a name that tells what was changed of the preset, as in "quick looks=[10]": rows say it, and
    `resume` takes no row that was timed in another way."""
    if (file := _file("timing", timing.name)) is None:
        return timing
    own: Any = OmegaConf.load(file)
    own.pop("defaults", None)  # values that a preset takes from another one count as changes
    preset: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Timing), own))
    asked, usual = (
        dataclasses.asdict(dataclasses.replace(each, precision=each.target, steady_block_s=each.block_s))
        for each in (timing, preset)
    )
    changed = [f"{name}={value}" for name, value in asked.items() if value != usual[name]]
    return dataclasses.replace(timing, name=" ".join([timing.name, *changed]))


# Options of sbatch that a job has by a key of its own, or that its script depends on.
KEYS = {"cpus-per-task": "cpus", "mem": "memory_gb", "time": "time_min", "partition": "partition", "account": "account"}
KEYS |= {"qos": "qos", "constraint": "constraint", "gres": "gres", "exclusive": "exclusive", "signal": "grace_s"}
OURS = (
    "array",
    "chdir",
    "error",
    "export",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "requeue",
    "wrap",
)


def check_words(cluster: Cluster) -> None:
    """Raise UserError for what would not stay one word of a job's script: sbatch reads its options line by line, and
    loses backslashes."""
    words = {f"flags.{name}": value for name, value in cluster.flags.items()}
    words |= {f.name: getattr(cluster, f.name) for f in dataclasses.fields(cluster)}
    for name in cluster.flags:
        if not re.fullmatch(r"[a-z][a-z-]*", str(name)):
            raise UserError(
                f"cluster.flags has {name!r}, which is no option of sbatch; write it as in {{reservation: weekly}}"
            )
        if name in KEYS:
            raise UserError(f"cluster.flags has {name}, which is cluster.{KEYS[name]}; set that")
        if name in OURS:
            raise UserError(f"cluster.flags has {name}, which minfer sets itself; leave it out")
    for name, value in words.items():
        if isinstance(value, str) and (not value.isprintable() or "\\" in value):
            raise UserError(
                f"cluster.{name} is {value!r}; it cannot have line breaks, backslashes or control characters"
            )
