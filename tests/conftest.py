"""Shared by all tests: which of them run and beside which others, a cheap timing, and shards to run without a launcher."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import is_hypothesis_test, settings

# Dozens of processes import PyTorch. Where bytecode may not be written, each would compile its modules, for seconds.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the threads of several processes wait for each other

from minfer.bench.timing import Timing
from minfer.process import fork_server, forked

if TYPE_CHECKING:  # what imports PyTorch does it in the functions: the process that only hands out tests needs none
    from minfer.ops import Kernel
    from minfer.plan.shard import Shard
    from minfer.rows import store
    from tests.tables import Workspace
    from tests.workshop import Workshop

ROOT = Path(__file__).resolve().parents[1]
COMPILER = str(ROOT / "tests" / "compiler" / "c++")
FAULTS = ROOT / "tests" / "faults" / "kernels.py"
SHARED = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
ROOM = pytest.StashKey[int]()
FAST = Timing(name="test", warmup_s=0, looks=[10], precision=0.5, cold_cap_s=2, least_rounds=3, steady_block_s=0.02)


@cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", metavar="K/N", type=part_and_parts, help="Run only the K-th of N parts of the tests, for example 2/4."
    )


def part_and_parts(word: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", word)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"--part takes K/N with K from 1 to N, such as 2/4, not {word!r}")
    return part, parts


def pytest_configure(config: pytest.Config) -> None:
    """Make a folder for what the processes of a test run share: locks, and files that are compiled once. If MINFER_TESTS_SHARED
    names a folder, several runs share it. Let Hypothesis draw few examples, or with -m slow its usual number. Collect no
    garbage while tests are collected: a sixth of the time of importing PyTorch."""
    gc.disable()
    settings.register_profile("few", max_examples=20)
    settings.load_profile("default" if is_slow_tier(config) else "few")
    if "MINFER_TESTS_SHARED" not in os.environ:
        config.stash[SHARED] = tempfile.TemporaryDirectory(prefix="minfer-tests-")
        os.environ["MINFER_TESTS_SHARED"] = config.stash[SHARED].name
    if "CXX" not in os.environ and shutil.which("g++"):
        os.environ["CXX"] = COMPILER


@pytest.hookimpl(tryfirst=True)  # before xdist is told that this process is ready
def pytest_collection_finish(session: pytest.Session) -> None:
    """Let tests that measure begin first. Later they would wait for all running tests, and all others would wait for them.
    Exclude the half a million objects of the modules imported so far from later garbage collections."""
    if is_first_worker(session.config) and session.items and alone(session.items[0]):
        enter(session.config, session.items[0])
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if SHARED in config.stash:
        config.stash[SHARED].cleanup()


def is_first_worker(config: pytest.Config) -> bool:
    """Whether this is the process that gets the first group. A pytest that a test starts is not."""
    return getattr(config, "workerinput", {}).get("workerid") == "gw0"


def is_slow_tier(config: pytest.Config) -> bool:
    return config.option.markexpr == "slow"


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow_tier(config) and is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.slow)  # once more, with more examples
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
    items.sort(key=place)
    words = config.option.markexpr
    named = config.option.keyword or any("::" in word for word in config.args)
    part, parts = config.option.part or (1, 1)

    def is_chosen(item: pytest.Item) -> bool:
        if not named and "slow" not in words and item.get_closest_marker("slow"):
            return False
        if not named and "gpu" not in words and item.get_closest_marker("gpu") and not has_gpu():
            return False
        return parts == 1 or zlib.crc32(whole(item).encode()) % parts == part - 1

    chosen = [item for item in items if is_chosen(item)]
    config.hook.pytest_deselected(items=[*{*items} - {*chosen}])
    items[:] = chosen
    if is_first_worker(config):
        groups_of(os.getppid()).write_text(json.dumps({item.nodeid: group(item) for item in items}))


def groups_of(run: int) -> Path:
    """The file with the groups of a run's tests. `run` is the number of pytest's main process."""
    shared = Path(os.environ["MINFER_TESTS_SHARED"])
    shared.mkdir(parents=True, exist_ok=True)
    return shared / f"groups-{run}"


@pytest.hookimpl(optionalhook=True)  # xdist may be missing
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Hands out tests by `group`. xdist's own mark for that, xdist_group, does nothing under pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def schedule(self) -> None:
            """Give the first group to the process that has entered the room already."""
            self.assigned_work = dict(sorted(self.assigned_work.items(), key=lambda pair: pair[0].gateway.id != "gw0"))
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return groups()[nodeid]

    @cache
    def groups() -> dict[str, str]:
        return json.loads(groups_of(os.getpid()).read_text())

    return Groups(config, log)


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the jobs of a cluster use the compiler that a user's jobs use: a container does not have that of the tests."""
    if group(item) == "cluster" and os.environ.get("CXX") == COMPILER:
        del os.environ["CXX"]


def alone(item: pytest.Item | None) -> bool:
    """Whether a test measures, so that nothing else may run beside it."""
    return item is not None and item.get_closest_marker("timing") is not None


def place(item: pytest.Item) -> int:
    """Tests that measure come first: they share one process. Those of single kernels on a GPU come last: they are many small
    groups, so that all processes end at about the same time."""
    if alone(item):
        return 0
    return 2 if item.get_closest_marker("gpu") and group(item) != item.path.stem else 1


def group(item: pytest.Item) -> str:
    """Tests of a group run in one process, so that what they share is made once: those that measure; all of a kernel's file
    that is compiled for them; of the others, those of a module."""
    if alone(item):
        return "timing"
    if item.path.parent.name in ("cluster", "containers"):
        return "cluster"  # of which there is one
    about = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if kernel := kernel_of(about):
        if kernel.backend == "cuda":
            return f"{kernel.op}-{kernel.source.stem}"
        if item.get_closest_marker("gpu"):
            return f"{kernel.op}-{kernel.name}"
    return about["file"] if "library" in getattr(item, "fixturenames", ()) else item.path.stem


def kernel_of(about: Mapping[str, object]) -> Kernel | None:
    """The kernel among a test's parameters, or the one of hgemm that they name."""
    if not {"kernel", "name"} & about.keys():
        return None  # without importing PyTorch, for tests/project/test_alone.py
    from minfer import ops

    kernel = about.get("kernel") or ops.get("hgemm").kernels.get(str(about.get("name")))
    return kernel if isinstance(kernel, ops.Kernel) else None


def whole(item: pytest.Item) -> str:
    """The key that `--part` hashes. Tests for which the same file is compiled share a key."""
    named = group(item)
    return item.nodeid if named in ("timing", "cluster", item.path.stem) else named


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the clock of a test's timeout starts
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """One who measures has the machine for itself until it has measured everything: all others hold the lock together."""
    if ROOM not in item.config.stash:
        enter(item.config, item)
    try:
        return (yield)
    finally:
        if not (alone(item) and alone(nextitem)):
            os.close(item.config.stash[ROOM])
            del item.config.stash[ROOM]


def enter(config: pytest.Config, item: pytest.Item) -> None:
    """Take the lock that a test needs. Who waits for the room until it is empty lets no other in."""
    shared = Path(os.environ["MINFER_TESTS_SHARED"])
    room = config.stash[ROOM] = os.open(shared / "room", os.O_CREAT | os.O_RDWR)
    with open(shared / "door", "w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone(item) else fcntl.LOCK_SH)


@pytest.fixture(autouse=True)
def memory_of_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Frees the memory that PyTorch keeps, after each GPU test: several processes share the GPU."""
    yield
    if request.node.get_closest_marker("gpu"):
        import torch

        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def faults() -> Iterator[None]:
    """The kernels of `tests/faults`, registered while the test runs and forgotten after it."""
    from minfer import ops

    kernels = ops.get("hgemm").kernels
    before = dict(kernels)
    ops.load_file(FAULTS)
    yield
    kernels.clear()
    kernels.update(before)
    ops.load_file.cache_clear()


@pytest.fixture
def run_shard(tmp_path: Path, faults: None) -> Callable[..., list[store.Row]]:
    """Run cases of hgemm under a supervisor, and return their rows in order."""
    from minfer import ops
    from minfer.plan.shard import Shard
    from minfer.process.death import Died
    from minfer.process.stopping import Stopping
    from minfer.rows import store
    from minfer.worker.events import Events
    from minfer.worker.shard import run_cases

    def run(kernels: list[str], device: str = "cpu", **changes: object) -> list[store.Row]:
        op = ops.get("hgemm")
        shape = dict.fromkeys(op.axes, 64)
        settings: dict[str, object] = {"case_timeout_s": 60.0, "build_timeout_s": 300.0, "extra": [str(FAULTS)]}
        settings |= {"folder": str(tmp_path / "run"), "results": str(tmp_path / "results"), "timing": FAST}
        shard = Shard(
            name="0000",
            run="test",
            device=device,
            cases=[op.case(name, "float16", shape) for name in kernels],
            **settings | changes,  # type: ignore[arg-type]
        )
        tell = Events(shard)
        try:
            run_cases(shard, tell, Stopping())
        except Died as error:
            tell(event="failed", message=f"no kernel could be run: {error}")
            raise
        return list(store.rows(store.files(tmp_path / "results")))

    return run


def launch(*words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does, but without the seconds that importing PyTorch takes."""
    return forked.run("minfer.launch", *words, timeout=timeout, starts_others=True)


def run_as_job(shard: Shard) -> subprocess.CompletedProcess[str]:
    """Run a shard as a job does: in a process of its own, which starts all others. As a fork it has PyTorch already."""
    return forked.run("minfer.jobs.node", str(shard.save()), "0", timeout=3000, starts_others=True)


@contextlib.contextmanager
def another_fork_server() -> Iterator[None]:
    """For what is run in another environment, which takes a fork server of its own. The one before it is kept, because another
    would import PyTorch, for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_server", None)
        try:
            yield
        finally:
            if fork_server._server:
                fork_server._server.close()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For small products: the threads of several wait for each other on a busy machine, longer than they compute."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def work(tmp_path: Path) -> Workspace:
    from tests.tables import Workspace

    return Workspace(tmp_path)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    from minfer import ops
    from tests.workshop import Workshop

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    made = Workshop(tmp_path, tmp_path / "compiler.log", [])
    made.write("tile.h", '#include "deeper.h"\n#define TILE (16 * DEEPER)\n')
    made.write("deeper.h", "#define DEEPER 2\n")
    yield made
    for name in made.kernels:
        del ops.get("hgemm").kernels[name]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where a `Process` writes what it prints. Those of the tests are modules of tests/answering."""
    return tmp_path / "log"
