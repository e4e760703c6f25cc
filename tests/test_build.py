"""Building kernels: cached by content, whatever becomes of the process, and with the compiler's own words."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minfer import build, ops
from minfer.build import BuildError, arch_of, first_error
from minfer.ops import Kernel

ROOT = Path(__file__).resolve().parents[1]
SOUND = '#include "tile.h"\nextern "C" int tile() { return TILE; }\n'
DEVICE = '#include "tile.h"\n__global__ void tile(int* out) { out[threadIdx.x] = TILE; }\n'

needs_nvcc = pytest.mark.skipif(build.toolkit() is None, reason="no CUDA compiler that fits this PyTorch")


@dataclass
class Workshop:
    """Kernels of a test's own, registered under hgemm, and a cache of their own.

    They register no torch op and include nothing of PyTorch's, so they compile in a second."""

    folder: Path
    log: Path  # a line for each call of the C++ compiler, when it is `counting`
    kernels: list[str]

    def kernel(self, file: str = "sound.cpp", text: str = SOUND) -> Kernel:
        op = ops.get("hgemm")
        source = self.folder / file
        source.write_text(text)
        (op.cuda if source.suffix == ".cu" else op.cpp)(str(source))
        self.kernels.append(source.stem)
        return op.kernels[source.stem]

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def counting_compiler(self) -> str:
        """A C++ compiler that logs its calls, and takes a while as long as the file `slow` is there."""
        path = self.write(
            "cxx",
            f'#!/bin/sh\necho "$@" >> {self.log}\n'
            f'case "$*" in *.cpp*) test -e {self.folder}/slow && sleep 4;; esac\nexec {build.compiler()} "$@"\n',
        )
        path.chmod(0o755)
        return str(path)

    def compilations(self) -> int:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return sum(".cpp" in line for line in lines)

    def start(self, kernel: Kernel, arch: str = "", **env: str) -> subprocess.Popen[str]:
        """`python -m minfer.build` on one of the kernels."""
        adder = "cuda" if kernel.backend == "cuda" else "cpp"
        register = self.write(
            "register.py", f"from minfer import ops\nops.get('hgemm').{adder}({str(kernel.source)!r})\n"
        )
        return subprocess.Popen(
            [sys.executable, "-m", "minfer.build", "hgemm", kernel.name, arch, str(register)], cwd=ROOT, text=True,
            env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    made = Workshop(tmp_path, tmp_path / "compiler.log", [])
    made.write("tile.h", '#include "deeper.h"\n#define TILE (16 * DEEPER)\n')
    made.write("deeper.h", "#define DEEPER 2\n")
    yield made
    for name in made.kernels:
        del ops.get("hgemm").kernels[name]


def finish(process: subprocess.Popen[str], seconds: float = 60) -> dict[str, object]:
    """What a build printed; it must have succeeded."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return json.loads(out)


# The cache


def test_what_was_built_is_found_and_not_built_again(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", workshop.counting_compiler())
    kernel = workshop.kernel()
    assert build.cached(kernel) is None
    first = build.build(kernel)
    library = Path(first.library)
    changed = library.stat().st_mtime_ns
    assert library.is_file() and first.seconds > 0 and workshop.folder / "cache" in library.parents
    assert build.build(kernel) == build.cached(kernel) == first
    assert library.stat().st_mtime_ns == changed and workshop.compilations() == 1


def test_a_build_says_where_its_library_is_in_a_new_process_too(workshop: Workshop) -> None:
    kernel = workshop.kernel()
    assert finish(workshop.start(kernel))["library"] == build.build(kernel).library


Change = Callable[[Workshop, pytest.MonkeyPatch], object]
CHANGES: dict[str, Change] = {
    "source": lambda workshop, patch: workshop.write("sound.cpp", SOUND + "// faster\n"),
    "header": lambda workshop, patch: workshop.write("tile.h", '#include "deeper.h"\n#define TILE (32 * DEEPER)\n'),
    "header of a header": lambda workshop, patch: workshop.write("deeper.h", "#define DEEPER 3\n"),
    "flags": lambda workshop, patch: patch.setattr(build, "CXX_FLAGS", [*build.CXX_FLAGS, "-ffast-math"]),
    "torch": lambda workshop, patch: patch.setattr(torch, "__version__", "2.99.0"),
    "compiler": lambda workshop, patch: patch.setenv("CXX", str(fake_compiler(workshop))),
    "processor": lambda workshop, patch: patch.setattr(build, "_processor", lambda: "flags: avx1024"),
    "cache": lambda workshop, patch: patch.setenv("TORCH_EXTENSIONS_DIR", str(workshop.folder / "other")),
}


def fake_compiler(workshop: Workshop) -> Path:
    path = workshop.write("newer-c++", "#!/bin/sh\necho newer-c++ 99.0\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_anything_that_decides_the_binary_changes_its_place(
    what: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = workshop.kernel()
    before = build._directory(kernel, "")
    CHANGES[what](workshop, monkeypatch)
    changed = build._directory(kernel, "")
    assert changed != before and changed.name.startswith("hgemm_sound_")


def test_a_change_elsewhere_does_not(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = workshop.kernel()
    before = build._directory(kernel, "")
    workshop.write("unrelated.h", "#define X 1\n")
    os.utime(kernel.source)
    monkeypatch.setattr(build, "NVCC_FLAGS", [*build.NVCC_FLAGS, "-G"])
    assert build._directory(kernel, "") == before


@needs_nvcc
def test_a_cuda_kernel_has_a_place_for_each_architecture(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = workshop.kernel("device.cu", DEVICE)
    places = {build._directory(kernel, arch) for arch in ("sm_80", "sm_89", "sm_90a")}
    assert len(places) == 3
    monkeypatch.setattr(build, "NVCC_FLAGS", [*build.NVCC_FLAGS, "-G"])
    assert build._directory(kernel, "sm_89") not in places


def test_a_changed_header_is_compiled_in(workshop: Workshop) -> None:
    kernel = workshop.kernel()
    first = build.build(kernel)
    workshop.write("deeper.h", "#define DEEPER 4\n")
    second = build.build(kernel)
    assert first.library != second.library
    assert [ctypes.CDLL(built.library).tile() for built in (first, second)] == [32, 64]


def test_a_cache_whose_library_was_deleted_is_built_anew(workshop: Workshop) -> None:
    kernel = workshop.kernel()
    library = Path(build.build(kernel).library)
    library.unlink()  # as cleaners of scratch space do
    assert Path(build.build(kernel).library).is_file()


def test_a_record_that_was_cut_short_is_built_anew(workshop: Workshop) -> None:
    kernel = workshop.kernel()
    (Path(build.build(kernel).library).parent / "built.json").write_bytes(b"")  # as a power cut leaves it
    assert Path(build.build(kernel).library).is_file()


# Builds that die


@pytest.mark.timeout(60)
def test_a_lock_that_a_killed_build_left_does_not_hang_the_next(workshop: Workshop) -> None:
    kernel = workshop.kernel()
    folder = build._directory(kernel, "")
    folder.mkdir(parents=True)
    (folder / "lock").write_text("")  # older PyTorch's: it waits while the file is there
    folder.with_suffix(".lock").write_text("")  # ours
    assert Path(build.build(kernel).library).is_file()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("killed", ["with its compilers", "alone"])
def test_a_build_after_one_that_was_killed_midway(
    workshop: Workshop, killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", workshop.counting_compiler())
    kernel = workshop.kernel()
    slow = workshop.write("slow", "")
    process = workshop.start(kernel)
    try:
        deadline = time.monotonic() + 60
        while workshop.compilations() == 0 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert workshop.compilations() == 1 and process.poll() is None, process.communicate()
        slow.unlink()
        if killed == "alone":  # as the kernel does when memory runs out; ninja and the compiler live on
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert build.cached(kernel) is None

        second = finish(workshop.start(kernel))
        assert Path(str(second["library"])).is_file() and workshop.compilations() == 2
        assert build.build(kernel).library == second["library"]  # and it loads
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def test_two_processes_that_want_one_kernel_build_it_once(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", workshop.counting_compiler())
    workshop.write("slow", "")  # so that the second comes while the first is compiling
    kernel = workshop.kernel()
    processes = [workshop.start(kernel) for _ in range(2)]
    first, second = (finish(process) for process in processes)
    assert first == second
    assert workshop.compilations() == 1


# A real kernel


@pytest.mark.timeout(120)
def test_a_real_kernel_builds_from_the_command_line_and_runs(workshop: Workshop) -> None:
    """In a process of its own: a torch op can be registered once, and other tests load it from the user's cache."""
    script = """
import torch
from minfer import build, ops
kernel = ops.get("hgemm").kernels["cpu_naive"]
function = build.function(kernel)
a, b = (torch.arange(6.0, dtype=torch.float16).view(shape) for shape in ((2, 3), (3, 2)))
out = torch.empty(2, 2, dtype=torch.float16)
function(out, a, b, 1.0, 0.0)
print(out.tolist() == (a.float() @ b.float()).tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["True"], done.stderr


@needs_nvcc
def test_a_cuda_kernel_builds_without_a_gpu_and_states_its_resources(workshop: Workshop) -> None:
    text = "__global__ void k(int* p) { __shared__ int s[100]; s[threadIdx.x] = *p; __syncthreads(); *p = s[7]; }\n"
    kernel = workshop.kernel("device.cu", text)
    built = build.build(kernel, "sm_80")
    assert Path(built.library).is_file()
    assert build.cached(kernel, "sm_80") == built and build.cached(kernel, "sm_90a") is None
    if build.resources(Path(built.library), "sm_80", build.toolkit()):  # where there is a cuobjdump
        assert built.registers and 2 <= built.registers <= 255
        assert built.shared_bytes is not None and 400 <= built.shared_bytes < 4096
        assert built.local_bytes == 0


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_device_code_alone_compiles_for_any_architecture(arch: str, workshop: Workshop) -> None:
    cubin = build.cubin(workshop.kernel("device.cu", DEVICE), arch, workshop.folder)
    assert cubin.read_bytes()[:4] == b"\x7fELF" and arch in cubin.name


# What a failed build says


def failure(kernel: Kernel, arch: str = "") -> str:
    with pytest.raises(BuildError) as caught:
        build.build(kernel, arch)
    message = str(caught.value)
    assert message and "\n" not in message and str(kernel.source.parent) not in message
    assert build.cached(kernel, arch) is None
    return message


def test_a_mistake_in_cpp_is_the_compilers_first_error(workshop: Workshop) -> None:
    kernel = workshop.kernel("broken.cpp", "int fine;\nint tile() { return no_such_name + nor_this; }\n")
    with pytest.raises(BuildError) as caught:
        build.build(kernel)
    assert "nor_this" in caught.value.log  # all that the compiler said
    message = failure(kernel)
    assert message.startswith("broken.cpp:2:") and "error" in message and "no_such_name" in message
    kernel.source.write_text(SOUND)  # and it can be mended
    assert Path(build.build(kernel).library).is_file()


def test_a_mistake_in_a_header_names_the_header(workshop: Workshop) -> None:
    workshop.write("deeper.h", "#error four warps are too few\n")
    message = failure(workshop.kernel())
    assert message.startswith("deeper.h:1:") and "four warps are too few" in message


def test_a_header_that_is_not_there(workshop: Workshop) -> None:
    message = failure(workshop.kernel("broken.cpp", '#include "tyle.h"\n'))
    assert message.startswith("broken.cpp:1:") and "tyle.h" in message


@needs_nvcc
def test_a_mistake_in_cuda_is_the_compilers_first_error(workshop: Workshop) -> None:
    kernel = workshop.kernel("broken.cu", "__global__ void k(int* p) { *p = no_such_name; }\n")
    message = failure(kernel, "sm_80")
    assert message.startswith("broken.cu(1)") and "error" in message and "no_such_name" in message
    with pytest.raises(BuildError, match="no_such_name"):
        build.cubin(kernel, "sm_80", workshop.folder)


@needs_nvcc
def test_too_much_shared_memory_is_told_by_ptxas(workshop: Workshop) -> None:
    text = "__global__ void k(int* p) { __shared__ int s[99999]; s[*p] = 1; __syncthreads(); *p = s[0]; }\n"
    message = failure(workshop.kernel("greedy.cu", text), "sm_80")
    assert "ptxas" in message and "shared data" in message


@needs_nvcc
def test_an_architecture_that_does_not_exist_is_told_by_nvcc(workshop: Workshop) -> None:
    message = failure(workshop.kernel("device.cu", DEVICE), "sm_11")
    assert "nvcc fatal" in message and "sm_11" in message.replace("compute_11", "sm_11")


def test_no_cpp_compiler(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    kernel = workshop.kernel()
    with pytest.raises(BuildError, match=r"no C\+\+ compiler '/nonexistent'.*CXX"):
        build.build(kernel)


def test_no_cuda_compiler(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "toolkit", lambda: None)
    kernel = workshop.kernel("device.cu", DEVICE)
    for attempt in (lambda: build.build(kernel, "sm_80"), lambda: build.cubin(kernel, "sm_80", workshop.folder)):
        with pytest.raises(BuildError, match="CUDA_HOME"):
            attempt()


def test_a_toolkit_of_another_major_version_is_passed_over(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, release in (("old", "release 9.2"), ("broken", "")):
        for name, text in (("bin/nvcc", f"#!/bin/sh\necho {release}\n"), ("include/cuda_runtime.h", "")):
            path = workshop.folder / folder / name
            path.parent.mkdir(parents=True)
            path.write_text(text)
            path.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(workshop.folder / folder))
        assert build.toolkit.__wrapped__() == build.toolkit()
    if home := build.toolkit():
        shutil.copytree(workshop.folder / "old", workshop.folder / "fits")
        nvcc = workshop.folder / "fits" / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\nexec {home}/bin/nvcc --version\n")
        monkeypatch.setenv("CUDA_HOME", str(workshop.folder / "fits"))
        assert build.toolkit.__wrapped__() == workshop.folder / "fits"  # and one that fits wins


def test_a_tool_is_found_on_the_path_then_in_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert build.tool("minfer-sight") is None
    for folder in (tmp_path / "home" / "bin", tmp_path / "path"):
        folder.mkdir(parents=True)
        (folder / "minfer-sight").touch(mode=0o755)
        assert build.tool("minfer-sight") == folder / "minfer-sight"


def test_the_command_line_ends_with_the_error_in_the_last_line(workshop: Workshop) -> None:
    process = workshop.start(workshop.kernel("broken.cpp", "int tile() { return no_such_name; }\n"))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == "" and "Traceback" not in err
    assert err.splitlines()[-1].startswith("broken.cpp:1:") and "no_such_name" in err.splitlines()[-1]


NINJA = """Error building extension 'hgemm_x': [1/2] c++ -MMD -MF x.o.d -DTORCH_EXTENSION_NAME=hgemm_x -I/opt/minfer \
-isystem /opt/torch/include -fPIC -std=c++17 -O3 -c /opt/minfer/ops/hgemm/x.cpp -o x.o
FAILED: [code=1] x.o
c++ -MMD -MF x.o.d -Werror=format -c /opt/minfer/ops/hgemm/x.cpp -o x.o
{}
ninja: build stopped: subcommand failed.
"""

SAMPLES: dict[str, tuple[str, str]] = {
    "g++": (
        "/opt/minfer/ops/hgemm/x.cpp: In function ‘int f()’:\n"
        "/opt/minfer/ops/hgemm/x.cpp:1:9: warning: unused variable ‘error’ [-Wunused]\n"
        "/opt/minfer/ops/hgemm/x.cpp:2:18: error: ‘undeclared’ was not declared in this scope\n"
        "    2 | int f() { return undeclared; }\n"
        "/opt/minfer/ops/hgemm/x.cpp:3:1: error: expected declaration",
        "x.cpp:2:18: error: ‘undeclared’ was not declared in this scope",
    ),
    "g++, in a header": (
        "In file included from /opt/minfer/ops/hgemm/x.cpp:4:\n"
        "/opt/minfer/cuda/tile.cuh:7:10: fatal error: mma.h: No such file or directory\ncompilation terminated.",
        "tile.cuh:7:10: fatal error: mma.h: No such file or directory",
    ),
    "g++, in a template": (
        "/opt/x.cpp: In instantiation of ‘struct Tile<1>’:\n/opt/x.cpp:2:6:   required from here\n"
        "/opt/x.cpp:1:43: error: static assertion failed: N must exceed one",
        "x.cpp:1:43: error: static assertion failed: N must exceed one",
    ),
    "g++, option": (
        "cc1plus: error: bad value ‘nonsense’ for ‘-march=’ switch",
        "cc1plus: error: bad value ‘nonsense’ for ‘-march=’ switch",
    ),
    "g++, killed": (
        "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
        "c++: fatal error: Killed signal terminated program cc1plus",
    ),
    "g++, full disk": (
        "/opt/x.cpp:9:1: fatal error: error writing to /tmp/ccQ.s: No space left on device\ncompilation terminated.",
        "x.cpp:9:1: fatal error: error writing to ccQ.s: No space left on device",
    ),
    "nvcc": (
        "/opt/minfer/ops/hgemm/x.cu(12): warning #177-D: variable \"error\" was declared but never referenced\n"
        "/opt/minfer/ops/hgemm/x.cu(14): error: identifier \"undeclared\" is undefined\n"
        "  __attribute__((global)) void k(int* p) { *p = undeclared; }\n"
        "                                                ^\n\n1 error detected in the compilation of \"x.cu\".",
        "x.cu(14): error: identifier \"undeclared\" is undefined",
    ),
    "nvcc, static assertion": (
        "/opt/x.cu(3): error: static assertion failed with \"K must be a multiple of 32\"\n1 error detected",
        "x.cu(3): error: static assertion failed with \"K must be a multiple of 32\"",
    ),
    "nvcc, option": ("nvcc fatal   : Unsupported gpu architecture 'sm_30'",
                     "nvcc fatal   : Unsupported gpu architecture 'sm_30'"),
    "ptxas": (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas /tmp/tmpxft_00001885_00000000-6_x.ptx, line 27; error   : Not a name of any known instruction: 'bogus'\n"
        "ptxas fatal   : Ptx assembly aborted due to errors",
        "ptxas tmpxft_00001885_00000000-6_x.ptx, line 27; error   : Not a name of any known instruction: 'bogus'",
    ),
    "ptxas, resources": (
        "ptxas error   : Entry function '_Z1kPi' uses too much shared data (0x61a80 bytes, 0xc000 max)",
        "ptxas error   : Entry function '_Z1kPi' uses too much shared data (0x61a80 bytes, 0xc000 max)",
    ),
    "ld, library": (
        "/usr/bin/ld: cannot find -lcudart: No such file or directory\ncollect2: error: ld returned 1 exit status",
        "ld: cannot find -lcudart: No such file or directory",
    ),
    "ld, symbol": (
        "/usr/bin/ld: /tmp/cc85XFQS.o: in function `g()':\nx.cpp:(.text+0x5): undefined reference to `missing()'\n"
        "collect2: error: ld returned 1 exit status",
        "x.cpp:(.text+0x5): undefined reference to `missing()'",
    ),
    "ninja": (
        "ninja: error: '/opt/minfer/x.cpp', needed by 'x.o', missing and no known rule to make it",
        "ninja: error: '/opt/minfer/x.cpp', needed by 'x.o', missing and no known rule to make it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", SAMPLES)
def test_the_first_error_of_every_tool_is_found(tool: str) -> None:
    said, expected = SAMPLES[tool]
    assert first_error(said) == expected
    assert first_error(NINJA.format(said)) == expected


@pytest.mark.parametrize("log", ["", "\n \n", "Segmentation fault", "something\nelse"])
def test_there_is_always_something_to_say(log: str) -> None:
    message = first_error(log)
    assert message.strip() and "\n" not in message


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((7, 5), "sm_75"), ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"),
     ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120a")],
)  # fmt: skip
def test_arch_of(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(capability) == arch
