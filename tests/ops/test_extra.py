"""A user's file that ends, fails or stays for ever when it is imported, and kernels whose names and files are odd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from minfer import ops
from minfer.build import cache
from minfer.build.cache import Built
from minfer.fingerprint import fingerprint
from minfer.ops import Kernel
from minfer.plan.config import UserError
from minfer.plan.extra import load
from minfer.plan.shard import Shard
from minfer.worker.compiler import Compiler
from minfer.worker.shard import run_shard
from tests.conftest import FAST

ENDS = {
    "import sys\nsys.exit()\n": ", line 2, ends its process by sys.exit(None) when it is imported; correct the file",
    "import sys\nsys.exit('no \\x1b[2Jlicense')\n": ", line 2, ends its process by sys.exit('no \\x1b[2Jlicense')",
    "import os\nos._exit(3)\n": " ends its process with exit status 3 when it is imported; correct the file",
    "import os\nos.abort()\n": " ends its process by SIGABRT when it is imported; correct the file",
    "raise ValueError('\x1b[31mred\\ntwo lines')\n": ", line 1, cannot be imported: ValueError: red two lines; correct",
    "raise KeyboardInterrupt\n": ", line 1, cannot be imported: KeyboardInterrupt; correct the file",
    "pass\nwhile True: pass\n": ", line 2, is still being imported after 0.5 s; correct the file",
    "while True:\n  try:\n    while True: pass\n  except BaseException: pass\n": " is still being imported after 0.5 s",
    "x = '\udcfc'\n": " cannot be imported: SyntaxError: ",
    "from minfer import ops\nops.get('hgemm').torch('a/b', lambda: 0)\n": ", line 2, cannot be imported: ValueError: a kernel "
    "of hgemm is called 'a/b'; a name is at most 100 letters, digits and the signs _ - . @ +, and begins with no dot; correct",
    "from minfer import ops\nops.get('hgemm').torch('\\x1b[2J', lambda: 0)\n": ", line 2, cannot be imported: ValueError: a "
    "kernel of hgemm is called '\\x1b[2J'; a name is",
}  # fmt: skip


@pytest.mark.parametrize("text", ENDS, ids=range(len(ENDS)))
def test_whatever_the_import_does_is_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text, "utf-8", errors="surrogateescape")
    with pytest.raises(UserError) as caught:
        load(str(path), seconds=0.5 if "while" in text else 60.0)
    assert str(caught.value).startswith(f"extra={path}") and ENDS[text] in str(caught.value)
    assert str(caught.value).isprintable()


def test_an_interrupt_ends_the_import_and_stays_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the copy of the process that imports has no process group yet."""
    (tmp_path / "mine.py").write_text("while True: pass\n")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def children() -> set[str]:
        return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}

    monkeypatch.setattr("select.select", interrupt)
    before = children()
    for _ in range(20):
        with pytest.raises(KeyboardInterrupt):
            load(str(tmp_path / "mine.py"))
    assert children() <= before


def test_it_ends_a_shard_with_the_same_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\nsys.exit(1)\n")
    case = ops.get("hgemm").case("torch", "float16", {"m": 8, "n": 8, "k": 8})
    shard = Shard(
        "0000", "test", str(tmp_path), str(tmp_path), "cpu", [case], FAST, 60.0, 60.0, extra=[str(tmp_path / "mine.py")]
    )
    with pytest.raises(SystemExit):
        run_shard(str(shard.save()))
    events = [json.loads(line) for line in (tmp_path / "progress" / "0000.jsonl").read_text().splitlines()]
    (failed,) = [event for event in events if event["event"] == "failed"]
    assert "ends its process by sys.exit(1) when it is imported" in failed["message"]


SOURCE = """// h\xe4lt: a comment in Latin-1
#include "ops/hgemm/hgemm.h"
#include <cstdio>

static const int printed = std::puts("{\\"library\\": \\"forged\\"}");

template <typename T>
void launch(const minfer::Gemm<T>& g) {
  for (int64_t i = 0; i < g.m * g.n; ++i) g.c[i] = static_cast<T>(0.0f);
}

MINFER_HGEMM(hgemm_prints_when_loaded, launch)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """One that prints when it is loaded, and has a comment in another encoding."""
    source = tmp_path / "prints_when_loaded.cpp"
    source.write_text(SOURCE, "latin-1")
    extra = tmp_path / "mine.py"
    extra.write_text(f"print('a file that prints')\nfrom minfer import ops\nops.get('hgemm').cpp({str(source)!r})\n")
    ops.load_file(extra)
    made = ops.get("hgemm").kernels["prints_when_loaded"]
    yield made
    del ops.get("hgemm").kernels["prints_when_loaded"]


def test_a_library_that_prints_when_it_is_loaded_is_built_like_any_other(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    case = ops.get("hgemm").case(kernel.name, "float16", {"m": 8, "n": 8, "k": 8})
    extra = [str(tmp_path / "mine.py")]
    shard = Shard("0000", "test", str(tmp_path), str(tmp_path), "cpu", [case], FAST, 60.0, 300.0, extra=extra)
    (tmp_path / "logs").mkdir()
    (built,) = Compiler(shard, "", lambda **event: None).compile([case]).values()
    assert isinstance(built, Built) and Path(built.library).is_file()


def test_a_comment_in_another_encoding_does_not_matter(kernel: Kernel) -> None:
    assert kernel.source in kernel.sources()
    assert fingerprint(kernel, "", 1) == fingerprint(kernel, "", 1)


@pytest.mark.parametrize("said", ["", "[]", '{"library": 1}', "[" * 100_000, "{}"])
def test_a_build_that_replies_with_anything_else_has_not_compiled(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ops.get("hgemm").case("cpu_naive", "float16", {"m": 8, "n": 8, "k": 8})
    shard = Shard("0000", "test", str(tmp_path), str(tmp_path), "cpu", [case], FAST, 60.0, 60.0)
    compiler = Compiler(shard, "", lambda **event: None)
    monkeypatch.setattr(cache, "find", lambda kernel, arch: None)
    monkeypatch.setattr(Compiler, "run", lambda *about: SimpleNamespace(stdout=said))
    (found,) = compiler.compile([case]).values()
    assert isinstance(found, str) and "gave no reply" in found
