"""Kernels that were compiled ahead: `minfer build`, and the wheel minfer-kernels."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minfer import build, ops
from minfer.build import ahead, forks, host, packed
from minfer.build.cache import Built
from minfer.build.errors import BuildError
from minfer.cli import build as command
from minfer.functional import best as chooser
from minfer.functional import library, product_times
from minfer.functional.ahead import OPS, choosable
from minfer.ops import Kernel
from minfer.plan.config import UserError
from minfer.process import orphans
from tests.conftest import ROOT
from tests.functional.calls import calls
from tests.functional.test_best import problems
from tests.workshop import Workshop


def loop() -> Kernel:
    return ops.get("axpby").kernels["cpu_loop"]


# What is built


def test_the_functions_call_these_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    called = {"rmsnorm_backward"}  # not by a function, but by a gradient

    def note(op: str, *_: object, **__: object) -> None:
        called.add(op)

    monkeypatch.setattr(library, "call", note)
    for call in calls().values():
        call()
    assert sorted(called) == list(OPS)


@pytest.mark.parametrize("count", (5, pytest.param(1000, marks=pytest.mark.slow)))
def test_what_is_chosen_can_be_built_ahead(count: int) -> None:
    rng = random.Random(1)
    for name in OPS:
        able = {arch: {kernel.name for kernel in choosable(name, arch)} for arch in ("", "sm_90a")}
        for problem in itertools.islice(problems(rng, name), count):
            capability = problem["capability"]
            arch = "" if capability is None else build.toolchain.arch_of(capability)
            if arch in able:
                try:
                    assert chooser.best(**problem).kernel in able[arch], problem
                except ValueError:
                    continue


def test_kernels_of_one_file_are_built_once_for_each_architecture() -> None:
    kernels = ops.get("hgemm").kernels.values()
    found = ahead.jobs(kernels, ["", "sm_80", "sm_90a"])
    assert len(found) == len({(job.kernel.source, job.arch) for job in found})
    archs = {arch: {job.kernel.name for job in found if job.arch == arch} for arch in ("", "sm_80", "sm_90a")}
    assert "v13_cooperative" in archs["sm_90a"] - archs["sm_80"] and "v04_mma" in archs["sm_80"]
    assert archs[""] and all(ops.get("hgemm").kernels[name].backend == "cpp" for name in archs[""])


# The command


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """What the command builds, by job, where a build takes no time; those in `failing` fail."""
    failing = {"hgemm/v04_mma sm_80": "v04_mma.cu(3): error: no"}
    library = tmp_path / "folder" / "library.so"
    library.parent.mkdir()
    library.write_bytes(b"\0GLIBC_2.99\0")

    def build_all(wanted: list[ahead.Job], workers: int, timeout_s: float) -> Iterator[ahead.Outcome]:
        for job in wanted:
            yield ahead.Outcome(job, failing.get(job.name) or Built(str(library), 1.0), 1.0)

    monkeypatch.setattr(ahead, "build_all", build_all)
    return failing


def test_it_says_what_it_built_and_what_failed(built: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["hgemm/v04_mma", "axpby", "--arch", "sm_80", "sm_90", "sm_80"]) == 1
    said = capsys.readouterr().out.splitlines()
    archs = itertools.product(("hgemm/v04_mma", "axpby/v01_naive", "axpby/v02_vectors"), ("sm_80", "sm_90a"))
    assert [line.split(" ", 1)[1].partition(":")[0] for line in said[:6]] == [" ".join(each) for each in archs]
    assert said[6].startswith("5 compiled, 0 found, 1 failed in ")
    assert said[7:] == ["failed: hgemm/v04_mma sm_80: v04_mma.cu(3): error: no"]
    assert command.main(["softmax", "--arch", "cpu"]) == 0


def test_the_models_of_products_come_with_the_kernels_that_they_choose_among(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = ops.get("hgemm").kernels
    assert command._build_models(ahead.jobs([kernels["v04_mma"], loop()], ["sm_80", ""])) == []
    monkeypatch.setattr(host, "build", lambda source: Built(str(tmp_path / "models.so"), 1.0))
    (library,) = command._build_models(ahead.jobs([kernels["v18_fitted"]], ["sm_90a"]))
    assert (library.kernel, library.arch) == (product_times.SOURCE, "")
    (tmp_path / "models.so").write_bytes(b"models")
    with zipfile.ZipFile(packed.write_wheel(tmp_path, "1.0", [library])) as packs:
        packs.extractall(tmp_path / "site")
    monkeypatch.setattr(packed, "_folder", lambda: tmp_path / "site" / packed.NAME)
    found = packed.find(product_times.SOURCE, "")
    assert found and found.read_bytes() == b"models"


@pytest.mark.slow
def test_it_builds_what_a_sweep_needs(built: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["minfer"])
    words = ["+sweep=rmsnorm", "kernel=[torch,v01_naive]", "dtype=float16"]
    assert [job.name for job in command._wanted(words, ["sm_80"])] == ["rmsnorm/v01_naive sm_80"]
    assert [job.name for job in command._wanted([*words[:1], "kernel=cpu_vectors"], [""])] == [
        "rmsnorm/cpu_vectors cpu"
    ]


@pytest.mark.parametrize(
    "words, said",
    (
        (["hgem"], "did you mean hgemm or sgemm?"),
        (["hgemm/v04_mm"], "did you mean v04_mma"),
        (
            ["--arch", "sm_90a", "hgemm"],
            "'hgemm' is no architecture; give names such as sm_80 or sm_90a, or cpu, and ops",
        ),
        (["hgemm/v13_cooperative", "--arch", "sm_80"], "hgemm/v13_cooperative cannot be compiled for sm_80"),
        (["axpby", "--jobs", "0"], "--jobs=0 starts no compiler; give a number from 1"),
        (["axpby", "--what"], "unrecognized arguments: --what; see minfer build --help"),
    ),
)
def test_a_mistake_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        command.main(words)
    assert said in str(caught.value)


def test_an_interrupt_ends_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_apart(op: str, name: str, arch: str, timeout_s: float) -> str:
        return "at once" if name == "cpu_loop" else str(forks.run("tests.answering.spins", timeout_s=300))

    monkeypatch.setattr(forks, "build_apart", build_apart)
    monkeypatch.setattr(ahead.cache, "find", lambda kernel, arch: None)
    wanted = [ahead.Job(loop(), ""), ahead.Job(replace(loop(), name="spins"), "")]
    outcomes = ahead.build_all(wanted, workers=2, timeout_s=300)
    assert next(outcomes).built == "at once"
    outcomes.close()  # as an exception in the caller does; returns when all compilers have ended
    assert not orphans.running


# The wheel


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed wheel that has libraries of one CPU kernel and one CUDA kernel."""
    content = tmp_path / "library.so"
    content.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBCXX_3.4.99\0")
    cuda = ops.get("axpby").kernels["v02_vectors"]
    libraries = [
        packed.Library(each, arch, Built(str(content), 1.0)) for each, arch in ((loop(), ""), (cuda, "sm_90a"))
    ]
    path = packed.write_wheel(tmp_path / "wheels", "1.2", libraries)
    assert path.name.startswith("minfer_kernels-1.2-py3-none-manylinux_2_34_")
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    forget()
    yield tmp_path / "site" / "minfer_kernels"
    forget()


def forget() -> None:
    packed._folder.cache_clear()
    packed._manifest.cache_clear()


def test_a_library_is_found_for_its_sources_architecture_cuda_and_processor(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = ops.get("axpby").kernels["v02_vectors"]
    assert packed.find(loop(), "") == installed / "axpby_cpu_loop.cpu.so"
    assert packed.find(cuda, "sm_90a") == installed / "axpby_v02_vectors.sm_90a.so"
    assert packed.find(cuda, "sm_80") is None
    monkeypatch.setattr(torch, "__version__", "2.99.0")  # one wheel for every PyTorch, and whatever compiler is here
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert packed.find(loop(), "") and packed.find(cuda, "sm_90a")
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    assert packed.find(loop(), "") and packed.find(cuda, "sm_90a") is None
    monkeypatch.setattr(packed, "processor", lambda: "flags : fpu sse2")
    assert packed.find(loop(), "") is None


@pytest.mark.parametrize("change", ("source", "flags", "no file", "no manifest"))
def test_a_library_of_something_else_is_not_used(change: str, installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if change == "source":
        read = packed.read_source_bytes
        monkeypatch.setattr(packed, "read_source_bytes", lambda path: read(path) + b"// faster\n")
    elif change == "flags":
        monkeypatch.setattr(build.toolchain, "CXX_FLAGS", [*build.toolchain.CXX_FLAGS, "-ffast-math"])
    elif change == "no file":
        (installed / "axpby_cpu_loop.cpu.so").unlink()
    else:
        (installed / "manifest.json").write_text("{")
    assert packed.find(loop(), "") is None


def test_a_kernel_from_elsewhere_is_not_looked_for(installed: Path, tmp_path: Path) -> None:
    source = tmp_path / "cpu_loop.cpp"
    source.write_bytes(loop().source.read_bytes())
    assert packed.find(replace(loop(), source=source), "") is None


def test_a_library_that_cannot_be_loaded_is_built(installed: Path) -> None:
    assert packed.find(loop(), "") is not None and not build._load_packed(loop(), "")


def test_what_measures_does_not_look_into_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "find", lambda kernel, arch: pytest.fail("it looked"))
    monkeypatch.setattr(build, "build", lambda kernel, arch: Built("its own", 1.0))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: print(path))
    with pytest.raises(BuildError, match="registers no"):
        build.function(replace(loop(), name="elsewhere"))


def run(text: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text], env=os.environ | variables, capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_first_call_compiles_nothing(workshop: Workshop, tmp_path: Path) -> None:
    """After `minfer build`, and with the wheel and an empty cache."""
    main, refusing = "import sys; from minfer.cli import main; sys.exit(main())", workshop.counting_compiler()
    call = "import minfer, torch; print(minfer.axpby(torch.ones(8), torch.ones(8), alpha=2.0).sum().item())"
    words = ["minfer", "build", "axpby", "--arch", "cpu", "--wheel", str(tmp_path / "wheels")]
    run(f"import sys; sys.argv = {words}; {main}", CXX=refusing)
    assert workshop.compilations() == 1
    assert float(run(call, CXX=refusing)) > 0 and workshop.compilations() == 1

    (wheel,) = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as packs:
        packs.extractall(tmp_path / "site")
        recorded = packs.read(next(name for name in packs.namelist() if name.endswith("RECORD"))).decode()
    assert len(recorded.splitlines()) == len(packs.namelist())
    assert json.loads((tmp_path / "site" / "minfer_kernels" / "manifest.json").read_text())["libraries"].keys() == {
        "axpby_cpu_loop.cpu"
    }
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    (tmp_path / "empty").mkdir()
    variables = {"PYTHONPATH": path, "TORCH_EXTENSIONS_DIR": str(tmp_path / "empty"), "CXX": refusing}
    assert float(run(call, **variables)) > 0 and workshop.compilations() == 1 and not [*(tmp_path / "empty").iterdir()]
