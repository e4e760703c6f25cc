"""Shared by all tests: the GPU mark, a cheap timing, and shards to run without a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from minfer import build, ops
from minfer.bench.timing import Timing
from minfer.plan.shard import Shard
from minfer.process.remote import Died
from minfer.process.stopping import Stopping
from minfer.rows import store
from minfer.worker.events import Events
from minfer.worker.shard import run_cases
from tests.tables import Workspace
from tests.workshop import Workshop

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests" / "faults" / "kernels.py"
FAST = Timing(name="test", warmup_s=0, looks=[10], precision=0.5, cold_cap_s=2, least_rounds=3, steady_block_s=0.02)


@cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(scope="session")
def cubins(request: pytest.FixtureRequest) -> Iterator[None]:
    """The device code that the chosen tests of this fixture read is compiled in the background, several kernels at once:
    it takes most of the time that they take. A test has `kernel`, or `name` of hgemm's, and perhaps `arch`."""
    wanted = {}
    for item in request.session.items:
        about = item.callspec.params if isinstance(item, pytest.Function) and "cubins" in item.fixturenames else {}
        if kernel := about.get("kernel") or ops.get("hgemm").kernels.get(about.get("name", "")):
            archs = [about["arch"]] if "arch" in about else ["sm_89", "sm_90a"]
            wanted |= {(kernel.source, arch): kernel for arch in archs if kernel.builds_for(arch)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        if build.toolkit():
            for (_, arch), kernel in wanted.items():
                pool.submit(build.cached_cubin, kernel, arch)  # a test that waits for it says what is wrong
        yield
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def faults() -> Iterator[None]:
    """The kernels of `tests/faults`, registered while the test runs and forgotten after it."""
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
    """The command line, as a user runs it."""
    command = [sys.executable, "-m", "minfer.launch", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout)


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
    return Workspace(tmp_path)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    made = Workshop(tmp_path, tmp_path / "compiler.log", [])
    made.write("tile.h", '#include "deeper.h"\n#define TILE (16 * DEEPER)\n')
    made.write("deeper.h", "#define DEEPER 2\n")
    yield made
    for name in made.kernels:
        del ops.get("hgemm").kernels[name]
