"""The ops are there once PyTorch and minfer are imported, in either order; minfer alone imports no PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

NAMES = (
    "add_rms_norm add_rms_norm_quant attention axpby axpby_out decode_attention dequant embedding gated_unit gemm_bias_gelu "
    "gemm_bias_relu hgemm hgemm_out kv_append_ layer_norm merge_state mla_decode moe_ffn moe_route quant_gemm rms_norm "
    "rms_norm_backward rms_norm_quant rope rope_ rope_append rope_backward sample sample_rows sample_seeded seq_sum "
    "silu_mul silu_mul_backward silu_mul_quant softmax softmax_out swiglu"
)
ARE_THERE = f"\nassert [name for name in {NAMES!r}.split() if not hasattr(torch.ops.minfer, name)] == []"


def run(text: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "imports",
    (
        pytest.param("import torch, minfer", marks=pytest.mark.slow),
        "import minfer, importlib.util\nassert 'torch' not in sys.modules\nimportlib.util.find_spec('torch')\nimport torch",
        pytest.param("from minfer import results; import minfer.plan.config, torch", marks=pytest.mark.slow),
        pytest.param("import minfer.ops, torch; import minfer; minfer.matmul", marks=pytest.mark.slow),
    ),
    ids=("PyTorch first", "minfer first", "parts of minfer first", "ops first"),
)
def test_all_ops_are_there_after_both_imports(imports: str) -> None:
    run("import sys\n" + imports + ARE_THERE)


@pytest.mark.slow
def test_pytorch_is_loaded_as_without_minfer() -> None:
    """Its loader is Python's own, with nothing left behind. Another process of minfer's own than a user's registers nothing:
    the fork server and workers start often, and call kernels, not functions."""
    run(
        "import minfer.ops, sys\nassert 'torch' in sys.modules and 'minfer.functional' not in sys.modules\n"
        "assert not [x for x in sys.meta_path if type(x).__module__ == 'minfer']"
    )
    run(
        "import minfer, torch, sys, importlib.machinery\n"
        "assert type(torch.__loader__) is importlib.machinery.SourceFileLoader\n"
        "assert 'exec_module' not in vars(torch.__loader__)\n"
        "assert not [x for x in sys.meta_path if type(x).__module__ == 'minfer']"
    )


@pytest.mark.slow
def test_an_exported_model_is_loaded_in_a_new_process(tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt2")
    run(
        "import sys, torch, minfer\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, gate, up, u):\n"
        "        logits = minfer.softmax(minfer.silu_mul(gate, up))\n"
        "        return torch.ops.minfer.sample(logits, u, 1.0, 1, 1.0, 0.0)\n"
        "x, u = torch.rand(2, 64), torch.rand(2)\n"
        "torch.export.save(torch.export.export(Model(), (x, x, u)), sys.argv[1])",
        path,
    )
    for imports in ("import torch, minfer", "import minfer, torch"):
        assert "(2,)" in run(
            f"{imports}, sys\nmodel = torch.export.load(sys.argv[1]).module()\n"
            "print(tuple(model(torch.rand(2, 64), torch.rand(2, 64), torch.rand(2)).shape))",
            path,
        )
