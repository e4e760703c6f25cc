"""`minfer.fuse` on models, its options, what it draws, and what its benchmark counts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F

import minfer
from tests.conftest import ROOT
from tests.fusion.fused import ALL, BF16, Layer, check, norm, randn, said

SLOW = pytest.mark.slow


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_small_llama_layer(capfd, dtype):
    check(capfd, Layer().to(dtype), randn(2, 5, 64, dtype=dtype), fused=ALL[dtype])


@SLOW
def test_sizes_that_change_are_fused_too(capfd):
    model = Layer()
    fused = minfer.fuse(model, rest="eager", unmeasured="fuse")
    with torch.no_grad():
        for batch, seq in ((2, 5), (3, 7), (4, 9)):
            x = randn(batch, seq, 64)
            torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
    lines = said(capfd)
    names = [re.match(r"minfer.fuse: (\w+)", line)[1] for line in lines if ": fused, " in line]
    assert sorted(names) == sorted(ALL[torch.float32] * 2)  # of the first sizes, and of all others


def test_one_weight_used_twice_and_a_graph_break(capfd):
    def twice(x, w):
        x = norm(x + 1, w)
        torch._dynamo.graph_break()
        return norm(x.sin(), w) + norm(x.cos(), w)

    check(capfd, twice, randn(3, 64), randn(64), fused=["rms_norm"] * 3)


def test_only_the_patterns_asked_for(capfd):
    both = lambda x, w, up: (norm(x, w), F.silu(x) * up)
    check(capfd, both, randn(5, 64), randn(64), randn(5, 64), patterns=["silu_mul"], fused=["silu_mul"])


def test_threads_share_a_module():
    fused, x, w, found = minfer.fuse(norm, rest="eager", unmeasured="fuse"), randn(2, 5, 64), randn(64), []

    def use():
        with torch.no_grad():
            found.append(fused(x, w))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for each in found:
        torch.testing.assert_close(each, norm(x, w), rtol=1e-4, atol=1e-5)


def test_the_picture(tmp_path, capfd):
    gate = lambda a, b: F.silu(a) * b
    check(capfd, gate, randn(3, 32), randn(3, 32), svg=tmp_path / "made", fused=["silu_mul"])
    (path,) = (tmp_path / "made").iterdir()
    text = "".join(ET.parse(path).getroot().itertext())
    assert path.name == "graph-0.svg" and "minfer.silu_mul.default" in text and "before:" in text
    assert "silu_mul at mul" in text


def test_a_picture_that_cannot_be_written_is_said_and_the_model_runs(tmp_path, capfd):
    path = tmp_path / "file"
    path.write_text("")
    text = check(capfd, lambda a, b: F.silu(a) * b, randn(3, 32), randn(3, 32), svg=path, fused=["silu_mul"])
    assert f"minfer.fuse: cannot write a picture to {path}: File exists" in text


def test_mistakes_are_a_sentence_each():
    for options, sentence in (
        ({"rest": "jit"}, r"^minfer.fuse takes rest='inductor' or 'eager', got 'jit'$"),
        ({"unmeasured": True}, r"^minfer.fuse takes unmeasured='refuse' or 'fuse', got True$"),
        ({"patterns": ["softmax"]}, r"^minfer.fuse takes patterns of rope, .*, got \['softmax'\]$"),
        ({"patterns": "rope"}, r"^minfer.fuse takes patterns of rope, .*, got 'rope'$"),
        ({"patterns": None}, r"^minfer.fuse takes patterns of rope, .*, got None$"),
        ({"svg": 3}, r"^minfer.fuse takes svg as the path of a folder, got 3$"),
        ({"svg": ""}, r"^minfer.fuse takes svg as the path of a folder, got ''$"),
    ):
        with pytest.raises(ValueError, match=sentence):
            minfer.fuse(Layer(), **options)
    for what, got in ((3, "int"), (Layer, "the class Layer")):
        with pytest.raises(TypeError, match=f"^minfer.fuse takes a module or a function, got {got}$"):
            minfer.fuse(what)
    compiled = torch.compile(lambda x: x + 1, backend="minfer", options={"rset": "eager"})
    with pytest.raises(
        Exception, match="minfer's backend has no option 'rset': it takes rest, patterns, unmeasured, svg, and"
    ):
        compiled(randn(3))


@SLOW
def test_inductor_runs_the_rest_and_joins_what_it_can(capfd):
    model = Layer().bfloat16()
    text = check(
        capfd, model, randn(2, 5, 64, dtype=BF16), rest="inductor", fused=["add_rms_norm", "rope", "swiglu", "rms_norm"]
    )
    assert "against torch.compile" in text
    joined = lambda a, b: (2 * a.sin() + b).exp()
    check(
        capfd,
        joined,
        randn(3, 8),
        randn(3, 8),
        rest="inductor",
        refused=["inductor computes sin, which it takes, in the same"],
    )
    before = lambda a, b: (2 * a + b).exp()
    why = "inductor computes exp, which takes it, in the same"
    check(capfd, before, randn(3, 8), randn(3, 8), rest="inductor", refused=[why])


@SLOW
def test_torch_compile_finds_the_backend_where_minfer_is_installed(tmp_path):
    about = tmp_path / "minfer-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: minfer\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[torch_dynamo_backends]\nminfer = minfer.fusion.backend:minfer\n")
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.torch_dynamo_backends]\nminfer = "minfer.fusion.backend:minfer"' in text
    call = "torch.compile(lambda x: x + 1, backend='minfer', options={'rest': 'eager'})(torch.ones(1)).item()"
    nowhere = "import importlib.metadata as m; m.entry_points = lambda **_: m.EntryPoints(); "
    for first in ("", "import minfer.fusion; ", nowhere + "import minfer.fusion; "):
        path = os.pathsep.join([str(tmp_path), str(ROOT), *sys.path])
        code, env = f"import torch; {first}print({call})", {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.stdout.strip() == "2.0", done.stderr


@SLOW
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_llama_of_transformers(capfd, dtype):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install --group test")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    ids = torch.randint(0, 50, (2, 7))
    call = lambda ids: model(ids, use_cache=False).logits
    with torch.no_grad():
        want, got = call(ids), minfer.fuse(call, rest="eager", unmeasured="fuse")(ids)
    close = {BF16: 3e-2, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(got, want, rtol=close, atol=close)
    names = [re.match(r"minfer.fuse: (\w+) at", line)[1] for line in said(capfd) if ": fused, " in line]
    product = "swiglu" if dtype == BF16 else "silu_mul"
    assert sorted(names) == sorted(["rms_norm", *["add_rms_norm"] * 4, *["rope", product] * 2]), names


@SLOW
def test_the_benchmark_counts_what_a_layer_calls_and_moves(tmp_path, capsys):
    import pyarrow.parquet as pq

    from benchmarks import fusion

    x, w = randn(8, 64), randn(64)
    with fusion.Eager() as eager:
        (x * 2 + w).view(-1)
    assert (eager.count.calls, eager.count.bytes) == (2, 4 * x.nbytes + w.nbytes)
    pair = lambda x, residual, w: norm(residual + x, w)
    with torch.no_grad(), fusion.compiled() as count:
        minfer.fuse(pair, unmeasured="fuse", patterns=["add_rms_norm"])(x, x.sin(), w)
    assert count.bytes >= 4 * x.nbytes + w.nbytes and count.calls <= 2  # the op, and a copy of the caller's residual
    options = ["--device", "cpu", "--unmeasured", "fuse", "--rounds", "6", "--write", "--root", str(tmp_path)]
    assert fusion.main(options) == 0
    (path,) = (tmp_path / "benchmarks" / "results").iterdir()
    for rows in (lambda rows: (rows[:3], rows[3:]))(pq.read_table(path).to_pylist()):
        eager, inductor, ours = rows
        assert ours["fused"] == ALL[torch.float32] and not inductor["fused"] and not eager["fused"]
        assert (
            ours["bytes"] <= inductor["bytes"] < eager["bytes"] and ours["calls"] < inductor["calls"] < eager["calls"]
        )
        assert all(len(row["samples_us"]) == 6 and row["launches"] is None for row in rows)
    assert capsys.readouterr().out.count("| decode 2x1+15 |") == 3
