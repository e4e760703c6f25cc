"""Names that a request may have, found from the sources of the ops without importing them."""

from __future__ import annotations

import json
import subprocess
import sys

from minfer import ops
from minfer.plan import known
from tests.conftest import ROOT


def test_every_kernel_and_dtype_is_known() -> None:
    for name in ops.names():
        assert set(ops.get(name).kernels) <= set.union(*known.words_of(name))
    assert known.parameters() == sorted({"call", *(param for name in ops.names() for param in ops.get(name).params)})
    assert tuple(ops.DTYPES) == known.DTYPES


TYPOS: list[tuple[list[str], str]] = [
    (["+sweep=hgemm", "kernel=v03_wmm"], "unknown hgemm kernel 'v03_wmm'; did you mean v03_wmma"),
    (["+sweep=hgemm", "kernel=[torch,cpu_naiv]"], "unknown hgemm kernel 'cpu_naiv'; did you mean cpu_naive"),
    (["+sweep=hgemm", "dtype=float1"], "unknown dtype 'float1'; did you mean float16"),
    (["op=hgem"], "unknown op 'hgem'; did you mean hgemm"),
    (["op=hgemm"], "dtype is not set; add dtype=..."),
    (["+sweep=hgemm", "+shapes={m:", "3"], "quote it"),
]


def test_typos_are_answered_before_pytorch_is_imported() -> None:
    """All in one process, which imports the launcher once."""
    code = (
        "import json, sys; from hydra.core.global_hydra import GlobalHydra; from minfer import launch\n"
        "for sys.argv in json.loads(sys.argv[1]):\n"
        "    GlobalHydra.instance().clear()\n"
        "    status = launch.main()\n"
        "    assert status == 2 and 'torch' not in sys.modules, (status, 'torch' in sys.modules)\n"
    )
    lines = json.dumps([["minfer.launch", *words] for words, _ in TYPOS])
    done = subprocess.run([sys.executable, "-c", code, lines], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, (_, said) in zip(done.stderr.splitlines(), TYPOS, strict=True):
        assert said in line


def test_another_python_than_that_of_the_environment_is_told_so() -> None:
    done = subprocess.run([sys.executable, "-S", "-m", "minfer.launch"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "uv run python -m minfer.launch" in done.stderr
