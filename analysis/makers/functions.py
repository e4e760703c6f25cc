"""The functions in docs/functions.md, from their sources: `python analysis/make.py functions`.

Reads the names of the public functions in minfer/__init__.py, and their signatures and docstrings in the files that it names,
without importing them; and from `benchmarks/results/` what a call costs the host, as benchmarks/host_cost.py measured it.
Rewrites what is between `<!-- functions:begin -->` and `<!-- functions:end -->` in docs/functions.md.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from minfer.analysis.makers import Maker, Options
from minfer.analysis.tables.markdown import table_lines, update
from minfer.rows.store import Row

COMMAND = "python analysis/make.py functions"
MODULE = "minfer.functional."
NONE = "—"
NO_ROW = "no row yet"
COST = "host-cost"  # files of benchmarks/host_cost.py
# What other projects call the same, or nearly the same: FlashInfer, flash-attn, Liger Kernel, vLLM (its `_custom_ops` unless
# said otherwise).
ELSEWHERE = {
    "attention": {
        "FlashInfer": "single_prefill_with_kv_cache, BatchPrefillWithRaggedKVCacheWrapper, "
        "BatchPrefillWithPagedKVCacheWrapper",
        "flash-attn": "flash_attn_func, flash_attn_varlen_func",
    },
    "cascade_attention": {"FlashInfer": "MultiLevelCascadeAttentionWrapper"},
    "decode_attention": {
        "FlashInfer": "BatchDecodeWithPagedKVCacheWrapper",
        "flash-attn": "flash_attn_with_kvcache",
    },
    "dequant": {"vLLM": "ggml_dequantize"},
    "kv_append_": {"FlashInfer": "append_paged_kv_cache", "vLLM": "reshape_and_cache_flash"},
    "layer_norm": {"flash-attn": "layer_norm_fn", "Liger": "liger_layer_norm"},
    "merge_state": {"FlashInfer": "merge_state", "vLLM": "merge_attn_states"},
    "mla_decode": {"FlashInfer": "BatchMLAPagedAttentionWrapper"},
    "moe_ffn": {"FlashInfer": "cutlass_fused_moe", "vLLM": "fused_experts"},
    "moe_route": {"vLLM": "fused_topk"},
    "quant_gemm": {"vLLM": "ggml_mul_mat_a8, cutlass_scaled_mm"},
    "rms_norm": {
        "FlashInfer": "rmsnorm, fused_add_rmsnorm",
        "flash-attn": "rms_norm_fn",
        "Liger": "liger_rms_norm, liger_fused_add_rms_norm",
        "vLLM": "rms_norm, fused_add_rms_norm",
    },
    "rope": {
        "FlashInfer": "apply_rope_with_cos_sin_cache",
        "flash-attn": "apply_rotary_emb",
        "Liger": "liger_rope",
    },
    "rope_": {"FlashInfer": "apply_rope_with_cos_sin_cache_inplace", "vLLM": "rotary_embedding"},
    "sample": {"FlashInfer": "top_k_top_p_sampling_from_logits, min_p_sampling_from_probs"},
    "silu_mul": {"FlashInfer": "silu_and_mul", "Liger": "liger_swiglu", "vLLM": "silu_and_mul"},
    "softmax": {"Liger": "liger_softmax"},
}
PROJECTS = ("FlashInfer", "flash-attn", "Liger", "vLLM")
# Lines that run on a CPU as they are, after `import minfer, torch`.
EXAMPLES = {
    "attention": "q, k, v = torch.randn(3, 1, 8, 4, 64).half()\nout = minfer.attention(q, k, v, causal=True)",
    "axpby": "y = minfer.axpby(torch.rand(8), torch.rand(8), alpha=2.0)",
    "cascade_attention": "q, k, v = torch.randn(3, 2, 8, 4, 64).half()\n"
    "prefix_k, prefix_v = torch.randn(2, 100, 4, 64).half()  # of 100 tokens\n"
    "out = minfer.cascade_attention(q, k, v, prefix_k, prefix_v, causal=True)",
    "decode_attention": "q, (k_cache, v_cache) = torch.randn(2, 1, 4, 64).half(), torch.randn(2, 2, 16, 2, 64).half()\n"
    "out = minfer.decode_attention(q, k_cache, v_cache, lengths=torch.tensor([5, 16]).int())",
    "dequant": 'w = minfer.dequant(torch.randint(256, (8, 34), dtype=torch.uint8), "q8_0")  # (8, 32)',
    "embedding": "x = minfer.embedding(torch.tensor([[2, 0, 1]]), torch.rand(10, 64))  # (1, 3, 64)",
    "gated_unit": "x, (w1, w2), (b1, b2) = torch.rand(4, 64).half(), torch.rand(2, 64, 32).half(), torch.rand(2, 32).half()\n"
    "y = minfer.gated_unit(x, w1, b1, w2, b2)",
    "gemm_bias_gelu": "layer = torch.nn.Linear(64, 32).half().requires_grad_(False)\n"
    "y = minfer.gemm_bias_gelu(torch.rand(4, 64).half(), layer.weight.t(), layer.bias)",
    "gemm_bias_relu": "layer = torch.nn.Linear(64, 32).half().requires_grad_(False)\n"
    "y = minfer.gemm_bias_relu(torch.rand(4, 64).half(), layer.weight.t(), layer.bias)",
    "kv_append_": "k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64)  # 4 pages of 16 slots\n"
    "minfer.kv_append_(k_cache, v_cache, torch.rand(3, 2, 64), torch.rand(3, 2, 64), where=torch.tensor([5, 6, -1]))",
    "layer_norm": "y = minfer.layer_norm(torch.rand(2, 64), torch.ones(64), torch.zeros(64))",
    "matmul": "c = minfer.matmul(torch.rand(8, 64).half(), torch.rand(64, 32).half())",
    "merge_state": "q, k, v = torch.randn(3, 1, 8, 4, 64).half()\n"
    "first, rest = (minfer.attention(q, k[:, i], v[:, i], return_lse=True) for i in (slice(3), slice(3, None)))\n"
    "out, lse = minfer.merge_state(*first, *rest)  # attention over all keys",
    "mla_decode": "q, cache = torch.randn(1, 1, 16, 576).half(), torch.randn(1, 64, 576).half()\n"
    "out = minfer.mla_decode(q, cache, lengths=torch.tensor([7]).int())",
    "moe_ffn": "x, gate_up, down = torch.randn(4, 64).half(), torch.rand(8, 2 * 32, 64).half(), torch.rand(8, 64, 32).half()\n"
    "weights, indices, counts, offsets, order = minfer.moe_route(torch.randn(4, 8), k=2)\n"
    "y = minfer.moe_ffn(x, weights, indices, gate_up, down, offsets=offsets, order=order)",
    "moe_route": "weights, indices, counts, offsets, order = minfer.moe_route(torch.randn(4, 8), k=2)",
    "quant_gemm": "w, scales = torch.randint(256, (8, 32), dtype=torch.uint8), torch.rand(8, 1).half()\n"
    'y = minfer.quant_gemm(torch.rand(2, 64).half(), w, "int4_g64", scales)  # (2, 8)',
    "rms_norm": "y = minfer.rms_norm(torch.rand(2, 64), torch.ones(64), residual=torch.rand(2, 64))",
    "rms_norm_quant": "y, scales = minfer.rms_norm_quant(torch.rand(2, 64), torch.ones(64), residual=torch.rand(2, 64))",
    "rope": "q, k, (cos, sin) = torch.rand(1, 8, 4, 64), torch.rand(1, 8, 2, 64), torch.rand(2, 2048, 32)\n"
    "q, k = minfer.rope(q, k, cos, sin, start=100)",
    "rope_": "q, k, (cos, sin) = torch.rand(1, 8, 4, 64), torch.rand(1, 8, 2, 64), torch.rand(2, 2048, 32)\n"
    "minfer.rope_(q, k, cos, sin, start=100)",
    "rope_append": "(k_cache, v_cache), (cos, sin) = torch.zeros(2, 4, 16, 2, 64), torch.rand(2, 2048, 32)\n"
    "positions, where = torch.tensor([20, 21]).int(), torch.tensor([36, 37])  # slots 4 and 5 of page 2\n"
    "q = minfer.rope_append(torch.rand(2, 4 + 2 * 2, 64), k_cache, v_cache, positions, where, cos, sin)  # (2, 4, 64)",
    "sample": "tokens = minfer.sample(torch.randn(2, 1000), temperature=0.7, top_k=50, top_p=0.9)",
    "seq_sum": "y = minfer.seq_sum(torch.rand(2, 8), lengths=torch.tensor([3, 8]).int())",
    "silu_mul": "y = minfer.silu_mul(*torch.rand(4, 2 * 64).chunk(2, -1))",
    "silu_mul_quant": "x, x_scales = minfer.silu_mul_quant(*torch.rand(4, 2 * 64).half().chunk(2, -1))\n"
    "w, scales = torch.rand(32, 64).to(torch.float8_e4m3fn), torch.ones(32)\n"
    'y = minfer.quant_gemm(x, w, "fp8", scales, x_scales=x_scales)  # (4, 32)',
    "softmax": "p = minfer.softmax(torch.rand(2, 100), mask=torch.tensor([3, 100]).int())",
    "swiglu": "x, (wg, wu) = torch.rand(4, 64).half(), torch.rand(2, 64, 32).half()\ny = minfer.swiglu(x, wg, wu)",
}


def functions(package: Path) -> dict[str, ast.FunctionDef]:
    """The public functions, by name, in alphabetical order. `package` is the folder of minfer."""
    tree = ast.parse((package / "__init__.py").read_text())
    where = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_WHERE"
    )
    modules = {name: module for name, module in ast.literal_eval(where).items() if module.startswith(MODULE)}
    found = {}
    for name, module in sorted(modules.items()):
        path = package.parent.joinpath(*module.split(".")).with_suffix(".py")
        defined = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        found[name] = next(node for node in defined if node.name == name)
    return found


def arguments(function: ast.FunctionDef) -> dict[str, str]:
    """The arguments with their annotations and defaults, by name; those after `*` are given by name only."""
    args = function.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + [*args.defaults, *args.kw_defaults]
    found = {}
    for argument, default in zip([*args.args, *args.kwonlyargs], defaults, strict=True):
        kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
        found[argument.arg] = f"{argument.arg}{kind}{f' = {ast.unparse(default)}' if default else ''}"
    return found


def signature(function: ast.FunctionDef) -> str:
    """As in a source, on as many lines as its length needs."""
    words = list(arguments(function).values())
    if function.args.kwonlyargs:
        words.insert(len(function.args.args), "*")
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    whole = f"minfer.{function.name}({', '.join(words)}){returns}"
    if len(whole) <= 120:
        return whole
    return "\n".join([f"minfer.{function.name}(", *(f"    {word}," for word in words), f"){returns}"])


def prose(function: ast.FunctionDef) -> list[str]:
    """A docstring as Markdown: what it says of an argument, `name: text`, is an item of a list."""
    names, found, inside = arguments(function).keys(), list[str](), False
    for line in (ast.get_docstring(function) or "").splitlines():
        about = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        if about and set(about[1].split(", ")) <= names:
            found.append(f"- {', '.join(f'`{name}`' for name in about[1].split(', '))}: {about[2]}")
            inside = True
        elif inside and line.startswith("    "):
            found.append(f"  {line.strip()}")
        else:
            inside = False
            found.append(line.strip())
    return found


def load_costs(folder: Path) -> dict[str, dict[str, list[Row]]]:
    """For each device on which it was measured what a call costs the host: the rows of each function."""
    found = dict[str, dict[str, list[Row]]]()
    for path in sorted(folder.glob(f"{COST}-*.parquet")):
        for row in pq.read_table(path).to_pylist():
            found.setdefault(row["device"], {}).setdefault(row["function"], []).append(row)
    return found


def cost(rows: list[Row]) -> str:
    """Microseconds and how many times those of torch.mm, for each call that was measured."""
    return "; ".join(
        f"{row['case'].removeprefix(row['function']).lstrip(', ')} {row['host_us']:.0f} ({row['ratio']:.1f} ×)".strip()
        for row in rows
    )


def lines(found: dict[str, ast.FunctionDef], costs: dict[str, dict[str, list[Row]]]) -> list[str]:
    """The table of names and costs, then what each function takes."""
    body, devices = [], list(costs) or [""]
    for name in found:
        named = (
            ", ".join(f"`{each}`" for each in ELSEWHERE.get(name, {}).get(project, "").split(", ") if each)
            for project in PROJECTS
        )
        spent = (cost(costs.get(device, {}).get(name, [])) or NO_ROW for device in devices)
        body.append([f"[`{name}`](#{name})", *spent, *(each or NONE for each in named)])
    header = ["minfer", *(f"host µs{f' on {device}' if device else ''}" for device in devices), *PROJECTS]
    told = table_lines(header, [":--"] * len(header), body)
    for name, function in found.items():
        told += ["", f"## {name}", "", "```text", *signature(function).splitlines(), "```", ""]
        told += prose(function)
        told += ["", "```python", *EXAMPLES[name].splitlines(), "```"]
    return told


def write(_: pa.Table, options: Options) -> list[str]:
    found = functions(options.sources.parent)
    if wrong := sorted((found.keys() ^ EXAMPLES.keys()) | (ELSEWHERE.keys() - found.keys())):
        return [f"{Path(__file__).name} needs an example of each public function and of no other: {', '.join(wrong)}"]
    body = "\n".join(lines(found, load_costs(options.benchmarks))) + "\n"
    problem = update(options.docs / "functions.md", "functions", body, COMMAND, options.check)
    return [problem] if problem else []


MAKER = Maker(write)
