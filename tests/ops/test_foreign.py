"""Five ops from outside of the repository, brought by `extra=` as a user would: everything works for them, and what is
wrong with a kernel of theirs is seen. Each folder of `tests/foreign` has an op's file, its kernels and mistaken ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from minfer import build, ops
from minfer.analysis import make_tables
from minfer.bench.integrity import Dishonest
from minfer.bench.judged import BUSY
from minfer.bench.measure import Bench
from minfer.bench.verify import verify
from minfer.build import toolchain
from minfer.ops import Case, Kernel, Op
from minfer.ops.op import REGISTERED
from minfer.plan.shard import Shard
from minfer.rows import store
from minfer.worker.judge import judge
from minfer.worker.supervisor import state
from tests.conftest import FAST, ROOT, run_as_job
from tests.emulator import Emulated, compiled
from tests.tables import MARKERS
from tests.tiers import mostly_slow

FOREIGN = ROOT / "tests" / "foreign"
ARCHS = ["sm_90a"]  # test_static.py has kernels of several architectures
CPU = torch.device("cpu")
BRIEF = replace(FAST, looks=[4])


@dataclass(frozen=True)
class Problem:
    """One of the ops, on which shape it is run, and what its rows must say."""

    folder: str
    shape: dict[str, int]
    metric: str
    operands: str  # the beginning of the column
    params: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return f"foreign_{self.folder}"

    @property
    def files(self) -> list[Path]:
        return [FOREIGN / self.folder / f"{self.folder}.py", FOREIGN / self.folder / "mistakes.py"]

    def cases(self, backends: tuple[str, ...]) -> list[Case]:
        """In float32, each kernel under the first call that it supports."""
        op = ops.get(self.name)
        kernels = [kernel for kernel in op.kernels.values() if kernel.backend in backends]
        made = [op.case(kernel.name, "float32", self.shape, dict(self.params)) for kernel in kernels]
        under = [[each for each in op.under_each_call(case) if runs(op, each)] for case in made]
        return [cases[0] for cases in under]


def runs(op: Op, case: Case) -> bool:
    return op.kernels[case.kernel].unsupported(case, None) is None


PROBLEMS = [
    Problem(
        "rope",
        {"tokens": 40, "heads": 8, "kv_heads": 2, "head_dim": 64},
        "tokens/s",
        "q inout float32 (40, 8, 64); k inout float32 (40, 2, 64); positions in int32 (40)",
    ),
    Problem(
        "topk",
        {"rows": 8, "n": 400, "k": 6},
        "GB/s",
        "values out float32 (8, 6); indices out int32 (8, 6); x in float32 (8, 400)",
    ),
    Problem(
        "gather",
        {"sequences": 4, "longest": 100, "page_size": 16, "dim": 64},
        "GB/s",
        "packed out float32 (",
        (("lengths", "uniform:3"),),
    ),
    Problem(
        "int4",
        {"m": 4, "n": 64, "k": 256},
        "TFLOP/s",
        "y out float32 (4, 64); x in float32 (4, 256); w in uint8 (64, 128); scales in float32 (64, 8)",
    ),
    Problem("swiglu", {"tokens": 16, "hidden": 128}, "GB/s", "y out float32 (16, 128); gate in float32 (16, 128)"),
]
ALWAYS = {"gather"}
every_problem = pytest.mark.parametrize(
    "problem", mostly_slow(PROBLEMS, lambda problem: problem.folder in ALWAYS), ids=lambda problem: problem.folder
)


@pytest.fixture(scope="module", autouse=True)
def mistakes() -> Iterator[dict[str, ModuleType]]:
    """The modules of the mistakes, by op. All is registered while these tests run, and forgotten after them."""
    yield {problem.name: [ops.load_file(file) for file in problem.files][1] for problem in PROBLEMS}
    for problem in PROBLEMS:
        del REGISTERED[problem.name]
    ops.load_file.cache_clear()


def run_shard(name: str, cases: list[Case], folder: Path, **changes: object) -> dict[str, store.Row]:
    """The rows of a shard, by op and kernel, as a job of a cluster makes them: in a process of its own."""
    extra = [str(file) for problem in PROBLEMS for file in problem.files]
    settings: dict[str, object] = {"folder": str(folder / name), "results": str(folder / "results" / name)}
    settings |= {"case_timeout_s": 60.0, "build_timeout_s": 300.0, "timing": BRIEF, "extra": extra}
    shard = Shard(name=name, run="test", device="cpu", cases=cases, **settings | changes)  # type: ignore[arg-type]
    done = run_as_job(shard)
    assert done.returncode == 0, done.stderr + (folder / name / "progress" / f"{name}.jsonl").read_text()
    return {f"{row['op']}/{row['kernel']}": row for row in store.rows(store.files(Path(shard.results)))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign")


@pytest.fixture(scope="module")
def tested(request: pytest.FixtureRequest) -> list[Problem]:
    """The problems that are asked for."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = [item.callspec.params.get("problem") for item in items]  # type: ignore[attr-defined]
    return [problem for problem in PROBLEMS if problem in asked]


@pytest.fixture(scope="module")
def rows(tested: list[Problem], folder: Path, mistakes: object) -> dict[str, store.Row]:
    """What became of all their kernels; of those in C++ in a shard of untrusted ones."""
    trusted = [case for problem in tested for case in problem.cases(("torch", "cuda"))]
    native = [case for problem in tested for case in problem.cases(("cpp",))]
    with ThreadPoolExecutor(2) as pool:
        profiled = pool.submit(run_shard, "0000", trusted, folder, profilers={"static": {"archs": ARCHS}})
        judged = pool.submit(run_shard, "0001", native, folder, untrusted=True)
        return profiled.result() | judged.result()


@every_problem
def test_an_op_is_verified_timed_and_judged(problem: Problem, rows: dict[str, store.Row]) -> None:
    kernels = [kernel for kernel in ops.get(problem.name).kernels.values() if right(kernel)]
    assert {kernel.backend for kernel in kernels} == {"torch", "cpp", "cuda"}
    for kernel in kernels:
        row = rows[f"{problem.name}/{kernel.name}"]
        if kernel.backend == "cuda":
            assert (row["status"], row["message"]) == ("unsupported", "needs a CUDA GPU")
            continue
        if kernel.backend == "cpp" and (row["message"] or "").startswith(BUSY[:20]):
            continue  # the judge accuses nobody for the machine's doing
        assert row["status"] in store.MEASURED, row["message"]
        assert row["guarantee"].startswith("judged, " if kernel.backend == "cpp" else "in-process")
        assert row["verified"] >= 3 and row["error_over_bound"] <= 1
        assert row["cold_us"] > 0 and row["steady_us"] > 0 and row["cold_rate"] > 0
        assert row["metric"] == problem.metric and row["bytes"] > 0
        backward = "d_gate out float32 (16, 128); d_up out float32 (16, 128); gate in float32 (16, 128)"
        assert row["operands"].startswith(backward if "backward" in kernel.name else problem.operands)


def right(kernel: Kernel) -> bool:
    return kernel.source.name != "mistakes.py"


@every_problem
def test_its_mistaken_kernels_have_no_time(
    problem: Problem, rows: dict[str, store.Row], mistakes: dict[str, ModuleType]
) -> None:
    for kernel, (status, words) in mistakes[problem.name].MISTAKES.items():
        row = rows[f"{problem.name}/{kernel}"]
        assert re.fullmatch(status, row["status"]) and re.search(words, row["message"]), row["message"]
        assert row["cold_us"] is None and row["steady_us"] is None


@pytest.mark.slow
@every_problem
def test_the_judge_sees_them_too(problem: Problem, mistakes: dict[str, ModuleType], tmp_path: Path) -> None:
    """Without what was seen in their own process. Who remembers has nothing to remember there: all inputs are new."""
    extra = [str(file) for file in problem.files]
    about = {
        "device": "cpu",
        "extra": extra,
        "op_files": extra[:1],
        "timeout_s": 60.0,
        "libraries": {},
        "sandbox": None,
    }
    for case in problem.cases(("torch",)):
        if case.kernel in mistakes[problem.name].MISTAKES and not case.kernel.startswith("remembers"):
            row = judge(about | {"case": case.to_dict(), "stated": state(case, None)}, tmp_path / "log")["row"]
            assert row["status"] in ("wrong", "dishonest", "error"), row
            assert "process" in row["message"]


@every_problem
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no CUDA compiler that fits this PyTorch")
def test_its_machine_code_is_read(problem: Problem, rows: dict[str, store.Row]) -> None:
    for kernel in ops.get(problem.name).kernels.values():
        if kernel.backend == "cuda":
            row = rows[f"{problem.name}/{kernel.name}"]
            assert dict(row["profilers"]) == {"static": "ok"}
            metrics, functions = dict(row["metrics"]), dict(row["functions"])
            for arch in ARCHS:
                assert metrics[f"static.{arch}.registers"] > 0 and metrics[f"static.{arch}.instructions"] > 0
                assert "float" in functions[f"static.{arch}"]
                call = "1" if kernel.name.endswith("backward") else "0"
                assert problem.folder != "swiglu" or f"(Call){call}" in functions[f"static.{arch}"]


@every_problem
@pytest.mark.skipif(toolchain.toolkit() is None, reason="no headers of a CUDA toolkit that fits this PyTorch")
def test_its_cuda_kernels_are_right_on_the_emulator(problem: Problem, tmp_path: Path) -> None:
    op, library = ops.get(problem.name), None
    for kernel in op.kernels.values():
        if kernel.backend == "cuda":
            library = library or compiled(kernel, tmp_path)
            function = Emulated(kernel, library)
            cases = list(op.cases(kernel, op.odd_shapes[:1]))
            assert len(cases) >= len(kernel.dtypes)
            for case in cases:
                verify(op, case, Alone(case), function, CPU, None, seed=1)


@dataclass(frozen=True)
class Alone:
    """Stands for a kernel that supports one case only: the emulator is slow."""

    case: Case
    deterministic: bool = True

    def unsupported(self, case: Case, capability: tuple[int, int] | None) -> str | None:
        return None if case == self.case else "takes too long"


def test_tables_are_made_of_their_rows(tested: list[Problem], folder: Path, rows: object) -> None:
    readme = folder / "README.md"
    readme.write_text(MARKERS)
    where = ["--results", folder / "results", "--readme", readme, "--pages", folder / "pages"]
    assert make_tables.main(map(str, where)) == 0
    assert all(f"| {problem.name} |" in readme.read_text() for problem in tested)


@pytest.mark.parametrize("restores", [True, False])
def test_a_harness_that_gives_nothing_back_is_noticed(restores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An honest kernel then rotates what it has rotated already, and so does the baseline after it."""
    op, problem = ops.get("foreign_rope"), PROBLEMS[0]
    case = op.case("torch", "float32", problem.shape)
    baseline = build.function(op.kernels["torch"])
    if not restores:
        monkeypatch.setattr(Bench, "_give_back", lambda self, index: None)
    bench = Bench(op, case, in_place, baseline, CPU, seed=1)
    if restores:
        assert len(bench.cold(FAST)) >= FAST.least_rounds
        return
    with pytest.raises(Dishonest, match="a wrong result"):
        bench.cold(FAST)


def in_place(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
    turned = ops.get("foreign_rope").kernels["torch"].function
    assert turned is not None
    for x, new in zip((q, k), turned(q, k, positions), strict=True):  # type: ignore[call-overload]
        x.copy_(new)
