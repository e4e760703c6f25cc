"""`profiler=static`: what the machine code says, held against what is known of it by other means."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from minfer import ops
from minfer.build import device_code, toolchain
from minfer.build.errors import BuildError
from minfer.ops import Case
from minfer.profilers import Job, occupancy, sass, static
from minfer.profilers.sass import Function
from tests.tiers import archs, is_always_compiled, mostly_slow

ARCHS = ("sm_89", "sm_90a")

needs_tools = pytest.mark.skipif(
    toolchain.toolkit() is None
    or not all((toolchain.toolkit() / "bin" / tool).exists() for tool in ("cuobjdump", "nvdisasm")),
    reason="no CUDA compiler and disassemblers that fit this PyTorch",
)


# Which function belongs to a case


def chosen(names: dict[str, dict[str, int]], dtype: str = "float16", **params: str) -> str | None:
    op = ops.get("hgemm")
    case = op.case("v03_wmma", dtype, dict.fromkeys(op.axes, 64), params)
    functions = [Function(name, 32, 0, 0, None, Counter(code)) for name, code in names.items()]
    found = static.choose(case, op.kernels["v03_wmma"], functions)
    return found[""].name if found else None


def test_the_dtype_is_the_first_element_type_among_the_template_arguments():
    names = {
        f"void f<{t}, 4>(X<{t}>)": {"HMMA.16816.F32": n} for n, t in enumerate(("__nv_bfloat16", "__half", "float"))
    }
    assert chosen(names) == "void f<__half, 4>(X<__half>)"
    assert chosen(names, "bfloat16") == "void f<__nv_bfloat16, 4>(X<__nv_bfloat16>)"
    assert chosen({"void f<my::Config<__half, 128> >(int)": {}}) and not chosen({"void f<__half>(int)": {}}, "bfloat16")


def test_the_accumulator_is_the_second_where_there_is_one():
    names = {"void f<__half, float>()": {"FFMA": 1}, "void f<__half, __half>()": {"FFMA": 9}}
    assert chosen(names) == "void f<__half, float>()"
    assert chosen(names, accumulate="float16") == "void f<__half, __half>()"


def test_enumerators_of_the_sources_are_the_cases_parameters():
    names = {f"void f<__half, (minfer::Layout){n}>(X)": {"FFMA": 9 - n} for n in (0, 1)}
    assert chosen(names, layout="TN") == "void f<__half, (minfer::Layout)1>(X)"
    assert chosen(names, layout="NN") == "void f<__half, (minfer::Layout)0>(X)"


def test_without_template_arguments_the_parameters_decide():
    names = {"f(float*, __half const*)": {"FFMA": 1}, "g(__nv_bfloat16*)": {"FFMA": 2}, "h(int)": {}}
    assert chosen(names) == "f(float*, __half const*)" and chosen(names, "bfloat16") == "g(__nv_bfloat16*)"


def test_of_several_the_one_that_multiplies_most_on_the_tensor_cores():
    names = {"a(int)": {"HMMA.16816.F32": 2}, "b(int)": {"FFMA": 500}, "c(int)": {"MOV": 900}, "copy": {}}
    assert chosen(names) == "a(int)"
    del names["a(int)"]
    assert chosen(names) == "b(int)"


@pytest.mark.parametrize(
    ("name", "arguments", "parameters"),
    [
        ("void f<A<1>, (B)2>(C<3>, int)", "A<1>, (B)2", "C<3>, int"),
        ("void (anonymous namespace)::f<int>(D)", "int", "D"),
        ("A<1>::f(int)", "", "int"),
        ("kernel", "", ""),
    ],
)
def test_template_arguments(name, arguments, parameters):
    assert static.template_arguments(name) == (arguments, parameters)


# From source to numbers


def compiled(source: str, arch: str, folder: Path) -> tuple[dict[str, Function], str]:
    """The functions of a CUDA source, by their names without parameters, and what ptxas says of them."""
    (folder / "source.cu").write_text(source)
    command = [toolchain.toolkit() / "bin" / "nvcc", "-cubin", "-Xptxas", "-v", f"-arch={arch}", folder / "source.cu"]
    done = subprocess.run([*command, "-o", folder / "source.cubin"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    functions = sass.read(folder / "source.cubin", arch, toolchain.toolkit())
    return {function.name.partition("(")[0]: function for function in functions}, done.stderr


SPILLS = """
__global__ void __launch_bounds__(1024) spills(float* out, const float* in, int n) {
  float v[96];  // 1024 threads leave 64 registers each
#pragma unroll
  for (int i = 0; i < 96; ++i) v[i] = in[threadIdx.x + i * n];
  for (int r = 0; r < n; ++r)
#pragma unroll
    for (int i = 0; i < 96; ++i) v[i] = v[i] * v[(i + 1) % 96] + v[(i + 7) % 96];
#pragma unroll
  for (int i = 0; i < 96; ++i) out[threadIdx.x + i * n] = v[i];
}
"""

SHARED = """
__global__ void __launch_bounds__(256) shared(float* out) {
  __shared__ float tile[12288];
  for (int i = threadIdx.x; i < 12288; i += 256) tile[i] = out[i];
  __syncthreads();
  for (int i = threadIdx.x; i < 12288; i += 256) out[i] = tile[12287 - i];
}
"""


@needs_tools
@pytest.mark.parametrize("arch", mostly_slow(ARCHS, lambda arch: arch == "sm_90a"))
def test_a_kernel_that_spills_is_caught_and_one_that_fills_its_shared_memory(arch, tmp_path):
    functions, said = compiled(SPILLS + SHARED, arch, tmp_path)
    spills = static.describe(functions["spills"], arch)
    ptxas = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n.*Used 64 ", said)
    assert ptxas and int(ptxas[2]) > 0
    assert [spills["stack_bytes"], spills["local_store_bytes"], spills["local_load_bytes"]] == [
        int(n) for n in ptxas.groups()
    ]
    assert spills["registers"] == 64 and spills["max_threads"] == 1024 and spills["FFMA"] >= 96
    assert spills["occupancy_percent"] == pytest.approx({"sm_89": 200 / 3, "sm_90a": 50.0}[arch])

    shared = static.describe(functions["shared"], arch)
    assert shared["shared_bytes"] == 48 << 10 and shared["max_threads"] == 256 and shared["local_store_bytes"] == 0
    assert shared["occupancy_percent"] == pytest.approx({"sm_89": 2 * 8 / 48 * 100, "sm_90a": 50.0}[arch])


def job(kernel: ops.Kernel, archs: tuple[str, ...], folder: Path) -> Job:
    op = ops.get(kernel.op)
    shapes = [dict.fromkeys(op.axes, 64) | {"m": 8}, *op.sizes["small"], *op.sizes.get("large", [])]
    cases: dict[object, Case] = {}  # one of each dtype and parameters
    for case in op.cases(kernel, shapes):
        cases.setdefault((case.dtype, *case.params.items()), case)
    return Job(list(cases.values()), {"archs": list(archs)}, "cpu", folder, 300)


@needs_tools
@pytest.mark.parametrize(
    "kernel",
    mostly_slow(ops.every_kernel(["cuda"]), lambda k: all(is_always_compiled(k, arch) for arch in archs(k))),
    ids=lambda kernel: f"{kernel.op}-{kernel.name}",
)
def test_every_cuda_kernel_has_its_metrics(kernel, tmp_path):
    supported = archs(kernel)
    work = job(kernel, tuple(supported), tmp_path)
    assert work.cases and all(kernel.builds_for(arch) for arch in supported)
    names = set()
    for case, finding in zip(work.cases, static.profile(work), strict=True):
        assert finding.why == "ok" and {scope for scope in finding.functions if "." not in scope} == set(supported)
        for arch in supported:
            metrics = {k.removeprefix(f"{arch}."): v for k, v in finding.metrics.items() if k.startswith(f"{arch}.")}
            assert 0 < metrics["registers"] <= 255 and metrics["instructions"] > 20
            assert metrics["shared_bytes"] <= 48 << 10
            element = next(name for name, dtype in static.ELEMENTS.items() if dtype == case.dtype)
            assert element in finding.functions[arch] or len(kernel.dtypes) == 1
            work_done = [v for k, v in metrics.items() if k.split(".")[0] in (*sass.TENSOR, *sass.FMA)]
            atomic = any(name.startswith("RED") for name in metrics)  # an addition of its own
            assert sum(work_done) > 0 or atomic or not ops.get(kernel.op).flops(case), (
                "neither tensor cores nor multiply-adds"
            )
            assert any(name.startswith(("STG.", "UTMASTG", "RED")) for name in metrics)
            if "max_threads" in metrics:
                assert 0 < metrics["occupancy_percent"] <= 100
            names.add(finding.functions[arch])
    assert len(names) >= len(kernel.dtypes)


@needs_tools
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_known_of_the_tensor_core_kernel(arch, tmp_path):
    """v03_wmma, by its source: 256 threads, 28,672 bytes in TN, 4 x 2 fragments of two HMMA each, twice unrolled."""
    kernel = ops.get("hgemm").kernels["v03_wmma"]
    work = job(kernel, (arch,), tmp_path)
    for case, finding in zip(work.cases, static.profile(work), strict=True):
        opcode = "HMMA.16816.F32" + (".BF16" if case.dtype == "bfloat16" else "")
        assert finding.metrics[f"{arch}.{opcode}"] == 32
        assert finding.metrics[f"{arch}.max_threads"] == 256
        tiles = {"TN": 128 * 40 + 128 * 40, "NN": 128 * 40 + 32 * 136}[case.params["layout"]]
        assert finding.metrics[f"{arch}.shared_bytes"] == 2 * tiles + 8 * 16 * 16 * 4


def test_the_rungs_for_hopper_are_left_out_for_other_architectures(tmp_path):
    op = ops.get("hgemm")
    names = [kernel.name for kernel in op.kernels.values() if kernel.archs == "sm_90a"]
    assert len(names) >= 6
    cases = [op.case(name, "bfloat16", dict.fromkeys(op.axes, 64)) for name in names]
    for finding in static.profile(Job(cases, {"archs": ["sm_80", "sm_89"]}, "cpu", tmp_path, 300)):
        assert finding.why == "the kernel needs sm_90a, asked for sm_80, sm_89" and not finding.metrics
    for name in names:
        kernel = op.kernels[name]
        assert kernel.builds_for("sm_90a") and not kernel.builds_for("sm_89") and not kernel.builds_for("sm_100a")
        for capability in ((8, 9), (10, 0)):
            assert (
                kernel.unsupported(cases[0], capability)
                == f"needs sm_90a, this GPU is sm_{capability[0]}{capability[1]}"
            )
        assert kernel.unsupported(cases[0], (9, 0)) is None


@needs_tools
def test_a_kernel_that_does_not_compile_says_so_for_the_architecture(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    source = tmp_path / "broken.cu"
    source.write_text(
        '#if __CUDA_ARCH__ == 900\n#error no Hopper\n#endif\nextern "C" __global__ void k(float* p) { *p = 1; }\n'
    )
    op = ops.get("hgemm")
    kernel = ops.Kernel("hgemm", "broken", "cuda", source, archs="sm_80+")
    monkeypatch.setitem(op.kernels, "broken", kernel)
    case = op.case("broken", "float16", dict.fromkeys(op.axes, 64))
    (finding,) = static.profile(Job([case], {"archs": ["sm_89", "sm_90a"]}, "cpu", tmp_path, 300))
    assert finding.why.startswith("for sm_90a: broken.cu") and "no Hopper" in finding.why
    assert finding.functions == {"sm_89": "k"} and finding.metrics["sm_89.STG.32"] == 1
    cubins = list(tmp_path.rglob("*.cubin"))
    assert len(cubins) == 1  # the cache
    before = cubins[0].stat().st_mtime_ns
    static.functions(kernel, "sm_89", 300)
    assert cubins[0].stat().st_mtime_ns == before


@pytest.mark.slow
@needs_tools
def test_a_cubin_is_compiled_again_when_a_file_has_changed_that_only_the_compiler_knows(tmp_path, monkeypatch):
    """In a folder with a comma; and a file that is included for the device only."""
    folder = tmp_path / "a, b"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "cache"))
    folder.mkdir()
    source, included = folder / "by macro.cu", folder / "a value.h"
    source.write_text(
        '#ifdef __CUDA_ARCH__\n#define FILE "a value.h"\n#include FILE\n#else\n#define VALUE 0\n#endif\n'
        'extern "C" __global__ void k(int* p) { *p = VALUE; }\n'
    )
    kernel = ops.Kernel("hgemm", "by_macro", "cuda", source, archs="sm_80+")
    made = []
    for value in (7, 7, 9):
        included.write_text(f"#define VALUE {value}\n")
        made.append(device_code.cached_cubin(kernel, "sm_89", 300).read_bytes())
    assert made[0] == made[1] != made[2]


@needs_tools
def test_a_compiler_that_takes_too_long_is_killed(tmp_path):
    with pytest.raises(BuildError, match=r"^the compiler was killed after 0.01 s$"):
        device_code.compile_cubin(ops.get("hgemm").kernels["v01_naive"], "sm_89", tmp_path, timeout_s=0.01)


def test_what_has_no_machine_code_here_says_why(tmp_path):
    op = ops.get("hgemm")
    shape = dict.fromkeys(op.axes, 64)
    cases = [op.case(name, "float16", shape) for name in ("torch", "cpu_naive", "triton_tiled")]
    cases.append(op.case("v01_naive", "float32", shape))
    findings = list(static.profile(Job(cases, {"archs": ["sm_89"]}, "cpu", tmp_path, 300)))
    assert [finding.metrics for finding in findings] == [{}] * 4
    assert [finding.why for finding in findings] == [
        "reads CUDA kernels only",
        "reads CUDA kernels only",
        "a Triton kernel has machine code only after a call on a GPU",
        "supports float16 and bfloat16, not float32",
    ]


# Triton, which compiles without a GPU too


@needs_tools
@pytest.mark.parametrize(("arch", "capability"), [pytest.param("sm_89", 89, marks=pytest.mark.slow), ("sm_90a", 90)])
def test_a_triton_cubin_is_read(arch, capability, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = ops.get("hgemm").kernels["triton_tiled"].module().kernel
    constants = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "READ_C": False}
    types = dict.fromkeys(("c_ptr", "a_ptr", "b_ptr"), "*fp16") | dict.fromkeys(("alpha", "beta"), "fp32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    divisible = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in
                 ("c_ptr", "a_ptr", "b_ptr", "k", "stride_cm", "stride_am", "stride_bk", "stride_bn")}  # fmt: skip
    source = ASTSource(kernel, signature, constants, divisible)
    options = {"num_warps": 8, "num_stages": 3}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    function, metrics = static.describe_triton(binary.asm["cubin"], arch, binary.metadata.shared)
    assert function.name == "kernel" and metrics["max_threads"] == 32 * binary.metadata.num_warps == 256
    assert metrics["shared_bytes"] == 0 and metrics["dynamic_shared_bytes"] == binary.metadata.shared > 32 << 10
    roots = {key.split(".")[0] for key in metrics}
    assert ("HGMMA" if capability == 90 else "HMMA") in roots and metrics["LDGSTS.128"] > 0
    expected = occupancy.percent(arch, 256, int(metrics["registers"]), binary.metadata.shared)
    assert metrics["occupancy_percent"] == expected > 0


def test_the_disassemblers_absence_is_one_sentence(tmp_path, monkeypatch):
    if toolchain.toolkit() is None or not shutil.which("nvcc", path=str(toolchain.toolkit() / "bin")):
        pytest.skip("no CUDA compiler")
    monkeypatch.setattr(
        sass, "read", lambda *_: (_ for _ in ()).throw(FileNotFoundError(2, "No such file", "nvdisasm"))
    )
    kernel = ops.get("hgemm").kernels["v02_tiled"]
    finding = next(static.profile(job(kernel, ("sm_89",), tmp_path)))
    assert finding.why == "for sm_89: nvdisasm does not run: No such file; install cuobjdump and nvdisasm"
