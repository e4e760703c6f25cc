"""Building kernels: cached by content, whatever becomes of the process."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minfer import build, ops
from minfer.build import cache, device_code, reads, toolchain
from minfer.build.errors import BuildError
from minfer.fingerprint import fingerprint
from minfer.ops import PACKAGE
from minfer.process import forked
from tests.conftest import ROOT
from tests.tiers import mostly_slow
from tests.workshop import DEVICE, SOUND, Workshop, needs_nvcc


def finish(process: forked.Started, seconds: float = 60) -> dict[str, object]:
    """What a build printed; it must have succeeded."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return json.loads(out)


# The cache


def test_what_was_built_is_found_and_not_built_again(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", workshop.counting_compiler())
    kernel = workshop.kernel()
    assert cache.find(kernel) is None
    first = build.build(kernel)
    library = Path(first.library)
    changed = library.stat().st_mtime_ns
    assert library.is_file() and first.seconds > 0 and workshop.folder / "cache" in library.parents
    assert build.build(kernel) == cache.find(kernel) == first
    assert library.stat().st_mtime_ns == changed and workshop.compilations() == 1


def test_a_build_says_where_its_library_is_in_a_new_process_too(workshop: Workshop) -> None:
    kernel = workshop.kernel()
    assert finish(workshop.start(kernel))["library"] == build.build(kernel).library


Change = Callable[[Workshop, pytest.MonkeyPatch], object]
CHANGES: dict[str, Change] = {
    "source": lambda workshop, patch: workshop.write("sound.cpp", SOUND + "// faster\n"),
    "header": lambda workshop, patch: workshop.write("tile.h", '#include "deeper.h"\n#define TILE (32 * DEEPER)\n'),
    "header of a header": lambda workshop, patch: workshop.write("deeper.h", "#define DEEPER 3\n"),
    "flags": lambda workshop, patch: patch.setattr(toolchain, "CXX_FLAGS", [*toolchain.CXX_FLAGS, "-ffast-math"]),
    "torch": lambda workshop, patch: patch.setattr(torch, "__version__", "2.99.0"),
    "compiler": lambda workshop, patch: patch.setenv("CXX", str(fake_compiler(workshop))),
    "processor": lambda workshop, patch: patch.setattr(toolchain, "processor", lambda: "flags: avx1024"),
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
    before = cache.directory(kernel, "")
    CHANGES[what](workshop, monkeypatch)
    changed = cache.directory(kernel, "")
    assert changed != before and changed.name.startswith("hgemm_sound_")


def test_a_change_elsewhere_does_not(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = workshop.kernel()
    before = cache.directory(kernel, "")
    workshop.write("unrelated.h", "#define X 1\n")
    os.utime(kernel.source)
    monkeypatch.setattr(toolchain, "NVCC_FLAGS", [*toolchain.NVCC_FLAGS, "-G"])
    assert cache.directory(kernel, "") == before


@needs_nvcc
def test_a_cuda_kernel_has_a_place_for_each_architecture(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = workshop.kernel("device.cu", DEVICE)
    places = {cache.directory(kernel, arch) for arch in ("sm_80", "sm_89", "sm_90a")}
    assert len(places) == 3
    monkeypatch.setattr(toolchain, "NVCC_FLAGS", [*toolchain.NVCC_FLAGS, "-G"])
    assert cache.directory(kernel, "sm_89") not in places


def test_a_copy_of_a_kernel_elsewhere_includes_its_ops_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy compiles, and its place depends on the headers of the op's folder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    original = ops.get("hgemm").kernels["cpu_naive"]
    copy = tmp_path / "copy.cpp"
    copy.write_text(original.source.read_text().replace("hgemm_cpu_naive", "hgemm_copy"))
    kernel = replace(original, name="copy", source=copy)
    assert {path.name for path in kernel.sources()} == {path.name for path in original.sources()} - {
        "cpu_naive.cpp"
    } | {"copy.cpp"}
    out, a = torch.empty(8, 8, dtype=torch.float16), torch.eye(8, dtype=torch.float16)
    build.function(kernel)(out, a, a)
    assert torch.equal(out, a)
    (tmp_path / "hgemm.h").write_text("#error its own folder comes first\n")
    with pytest.raises(BuildError, match="its own folder comes first"):
        build.build(kernel)


SHARING = """#include "tile.h"
inline int calls = 0;
template <typename T> int count() { static int among = 0; static thread_local int own = 0; return ++among + ++own; }
extern "C" int tile() { return ++calls + count<float>(); }
"""


def test_two_kernels_from_elsewhere_share_no_variable_in_one_process(workshop: Workshop) -> None:
    """Two submissions may be copies of one kernel, with the same names and other sizes."""
    kernels = [workshop.kernel(f"{name}.cpp", SHARING + f"// {name}\n") for name in ("one", "other")]
    assert [ctypes.CDLL(build.build(kernel).library).tile() for kernel in kernels] == [3, 3]


def test_the_host_code_of_a_cuda_kernel_from_elsewhere_shares_none_either(workshop: Workshop) -> None:
    flag = {"-fno-gnu-unique", "-Xcompiler=-fno-gnu-unique"}
    clang = "clang" in toolchain.compiler_version(toolchain.compiler())
    assert clang or flag & {*toolchain.flags_of(workshop.kernel("device.cu", DEVICE), "sm_90a")}
    for ours in (ops.get("hgemm").kernels[name] for name in ("cpu_blocked", "v01_naive")):
        assert not flag & {*toolchain.flags_of(ours, "sm_90a")}


# What uses each function that `minfer/device_only` declares with PyTorch's types, and is of the same type with both.
DECLARED = """
#include <torch/csrc/stable/ops.h>
using torch::headeronly::ScalarType;
torch::stable::Tensor scratch(int32_t device) {
  torch::stable::Device place(torch::headeronly::DeviceType::CUDA, device);
  return torch::stable::empty({int64_t{1}}, ScalarType::Float, std::nullopt, place);
}
"""


def pytorchs_part() -> str:
    """A CUDA source that compiles if PyTorch has each enumerator, and each method with its type, that `device_only` has."""
    declared = PACKAGE / "device_only" / "torch"
    methods = re.findall(
        r"^  (\S.*?)(\w+)\((.*)\) const;", (declared / "csrc/stable/tensor.h").read_text(), re.MULTILINE
    )
    values = re.findall(
        r"enum class ScalarType : int8_t \{(.*)\};", (declared / "headeronly/core/ScalarType.h").read_text()
    )
    assert len(methods) == 10 and len(values) == 1
    lines = [
        f"{'torch::' if 'headeronly' in kind else ''}{kind}(torch::stable::Tensor::*method{at})({given}) const = "
        f"&torch::stable::Tensor::{name};"
        for at, (kind, name, given) in enumerate(methods)
    ]
    lines += [
        f"constexpr ScalarType value_{name} = ScalarType::{name};" for name in values[0].replace(" ", "").split(",")
    ]
    return DECLARED + "\n".join(lines)


@pytest.mark.slow
@needs_nvcc
def test_a_copy_of_a_cuda_kernel_elsewhere_compiles_too(tmp_path: Path) -> None:
    """With PyTorch's own headers, which have what those that replace them for our kernels declare."""
    original = ops.get("hgemm").kernels["v01_naive"]
    copy = tmp_path / "v01_naive.cu"
    copy.write_text(original.source.read_text() + pytorchs_part())
    assert device_code.compile_cubin(replace(original, name="copy", source=copy), "sm_80", tmp_path).is_file()


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
    folder = cache.directory(kernel, "")
    folder.mkdir(parents=True)
    (folder / "lock").write_text("")  # older PyTorch's: it waits while the file is there
    folder.with_suffix(".lock").write_text("")  # ours
    assert Path(build.build(kernel).library).is_file()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("killed", [pytest.param("with its compilers", marks=pytest.mark.slow), "alone"])
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
        assert workshop.compilations() == 1 and process.poll() is None, process.communicate(1)
        slow.unlink()
        if killed == "alone":  # as the kernel does when memory runs out; ninja and the compiler live on
            os.kill(process.pid, signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGKILL)
        while process.poll() is None:
            time.sleep(0.01)
        assert cache.find(kernel) is None

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


def test_threads_that_want_one_kernel_build_it_once(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", workshop.counting_compiler())
    kernel, barrier = workshop.kernel(), threading.Barrier(4)

    def build_at_once(_: int) -> build.Built:
        barrier.wait()
        return build.build(kernel)

    with ThreadPoolExecutor(4) as pool:
        built = [*pool.map(build_at_once, range(4))]
    assert built == [built[0]] * 4 and workshop.compilations() == 1


# A real kernel


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_real_kernel_builds_from_the_command_line_and_runs(workshop: Workshop) -> None:
    """In a process of its own: a torch op can be registered once, and other tests load it from the user's cache."""
    script = """
import torch
from minfer import build, ops
from minfer.build import cache, device_code, reads, toolchain
from minfer.build.errors import BuildError
from minfer.build.toolchain import arch_of
from minfer.fingerprint import fingerprint
from minfer.ops import PACKAGE
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
    assert cache.find(kernel, "sm_80") == built and cache.find(kernel, "sm_90a") is None
    if device_code.resources(Path(built.library), "sm_80", toolchain.toolkit()):  # where there is a cuobjdump
        assert built.registers and 2 <= built.registers <= 255
        assert built.shared_bytes is not None and 400 <= built.shared_bytes < 4096
        assert built.local_bytes == 0


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_device_code_alone_compiles_for_any_architecture(arch: str, workshop: Workshop) -> None:
    cubin = device_code.compile_cubin(workshop.kernel("device.cu", DEVICE), arch, workshop.folder)
    assert cubin.read_bytes()[:4] == b"\x7fELF" and arch in cubin.name


# What the compiler reads besides the sources that minfer finds


READS: dict[str, tuple[str, str]] = {  # a source, and the file that it reads
    "a macro": ('#define NAME "table.inc"\nextern "C" int value() { return\n#include NAME\n; }\n', "table.inc"),
    "angle brackets": ('extern "C" int value() { return\n#include <table.inc>\n; }\n', "table.inc"),
    "has_include": ('#if __has_include("{}/no")\n#endif\nextern "C" int value() { return 1; }\n', "no"),
    "incbin": ('asm(".data; .global got; got: .incbin \\"{}/table.inc\\"; .byte 0; .text");\n'
               'extern "C" char got[]; extern "C" int value() { return got[0]; }\n', "table.inc"),
}  # fmt: skip


@pytest.mark.parametrize("how", mostly_slow(READS, lambda how: how == "a macro"))
def test_a_build_is_stale_when_a_file_has_changed_that_the_compiler_read(
    how: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPATH", str(workshop.folder))
    text, name = READS[how]
    workshop.write(name, "1\n")
    kernel = workshop.kernel(text=text.replace("{}", str(workshop.folder)))
    first, source = build.build(kernel), fingerprint(kernel, "", 1)
    assert cache.find(kernel) == first and fingerprint(kernel, "", 1) == source
    folder = cache.directory(kernel, "")
    record = json.loads((folder / "reads.json").read_text())
    if how in ("has_include", "incbin"):
        monkeypatch.setattr(reads, "_this_process", "another")  # only the process that built knows what it read
    else:
        assert list(record) == [str(workshop.folder / name)]
        workshop.write(name, "2\n")
    assert cache.find(kernel) is None and fingerprint(kernel, "", 1) != source
    second = build.build(kernel)
    assert cache.find(kernel) == second and cache.directory(kernel, "") == folder


@pytest.mark.slow
def test_a_build_of_others_without_a_record_is_stale(workshop: Workshop) -> None:
    kernel = workshop.kernel()
    build.build(kernel)
    (cache.directory(kernel, "") / "reads.json").unlink()
    assert cache.find(kernel) is None
    assert build.build(kernel) == cache.find(kernel)
