"""The supervisor and the launcher read text from foreign code: its sources, rules and replies. Whatever it contains, only the
row of its kernel may be lost."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from minfer import ops
from minfer.fingerprint import _meaning, fingerprint
from minfer.ops import python_source
from minfer.plan.shard import hash_outside
from minfer.process.death import Died
from minfer.process.remote import MOST_BYTES, MOST_CONTAINERS, MOST_VALUES
from minfer.rows import store
from minfer.worker import write_rows
from minfer.worker.supervisor import RuleFailed, Supervisor, derive_columns, state
from tests.conftest import FAST
from tests.process.test_replies import MACHINE, Lying, a_shard

HGEMM = ops.get("hgemm")
SHAPE = {"m": 64, "n": 64, "k": 64}
TRITON = {
    "no_syntax": "def hgemm(:\n",
    "a_long_sum": f"def hgemm(*_):\n    return {'+'.join(['1'] * 20_000)}\n",
    "deep": f"x = {'-' * 100_000}1\n",
    "no_text": "x = '\0'\n",
}
CPP = {"comments": "/* " * 20_000, "a_big_header": '#include "big.h"\n', "a_special_file": '#include "/proc/kmsg"\n'}


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Path]:
    """An extra file that registers the kernels above; this process registers them, too."""
    with open(tmp_path / "big.h", "w") as file:
        file.truncate(300 << 20)
    lines = ["from minfer import ops", "op = ops.get('hgemm')"]
    for kind, texts, suffix in (("triton", TRITON, ".py"), ("cpp", CPP, ".cpp")):
        for name, text in texts.items():
            path = tmp_path / f"{name}{suffix}"
            path.write_text(text)
            lines.append(f"op.{kind}({str(path)!r})")
    lines += ["def sound_one(out, a, b, alpha=1.0, beta=0.0):"]
    lines += [
        "    ops.get('hgemm').kernels['torch'].function(out, a, b, alpha, beta)",
        "op.torch('sound_one', sound_one)",
    ]
    extra = tmp_path / "extra.py"
    extra.write_text("\n".join(lines) + "\n")
    ops.load_file(extra)
    yield extra
    for name in (*TRITON, *CPP, "sound_one"):
        del HGEMM.kernels[name]


def test_each_kernel_has_a_fingerprint_and_a_row(foreign: Path, tmp_path: Path) -> None:
    shard = a_shard(tmp_path, [HGEMM.case(name, "float16", SHAPE) for name in (*TRITON, *CPP, "sound_one")])
    supervisor, rows = Supervisor(shard, tmp_path / "log"), {}
    for case in shard.cases:
        if case.kernel not in ("comments", "sound_one"):
            columns = supervisor.run(case, None)
            rows[case.kernel] = write_rows.complete(shard, MACHINE, None, case, columns, 0.0)
        assert len(fingerprint(HGEMM.kernels[case.kernel], "", 1)) == 16
    store.to_table(rows.values())
    limit = "and a source file may have at most 4,194,304; make it smaller"
    assert rows["a_big_header"]["message"] == f"big.h has 314,572,800 bytes, {limit}"
    assert {rows[name]["status"] for name in TRITON} == {"unsupported"}  # on a CPU
    hashes = hash_outside([str(foreign)], shard.cases)
    assert str(tmp_path / "deep.py") in hashes and str(tmp_path / "a_big_header.cpp") not in hashes


def test_a_change_of_what_python_cannot_parse_changes_the_fingerprint(foreign: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep.py"
    before = fingerprint(HGEMM.kernels["deep"], "", 1)
    path.write_text("x = " + "-" * 100_000 + "2\n")
    _meaning.cache_clear()
    assert fingerprint(HGEMM.kernels["deep"], "", 1) != before


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("open(Path(__file__).with_name('table.bin'))\n", "table.bin"),
        ('data = HERE / "data/table.bin"\n', "data/table.bin"),
        ("import helper\n", "helper.py"),
        ("    from helper.inner import f\n", "helper/inner.py"),
    ],
)
def test_a_change_of_a_file_that_python_names_changes_the_fingerprint(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "reads.py").write_text(text)
    kernel = replace(HGEMM.kernels["torch"], name="reads", source=tmp_path / "reads.py")
    found = {fingerprint(kernel, "", 1)}
    for content in ("1", "2"):
        (tmp_path / name).write_text(content)
        found.add(fingerprint(kernel, "", 1))
    assert len(found) == 3
    (tmp_path / "other.bin").touch()
    assert fingerprint(kernel, "", 1) in found


def test_a_tree_is_the_same_from_a_process_of_its_own() -> None:
    text = Path(ops.__file__).read_text()
    assert python_source.meaning_apart(text) == python_source.meaning(text)
    assert [python_source.meaning_apart(text) for text in TRITON.values()] == [None] * len(TRITON)


def test_a_rule_that_fails_costs_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(case: ops.Case) -> str | None:
        raise KeyError("no such axis")

    kernel = replace(HGEMM.kernels["cpu_naive"], requires=rule)
    monkeypatch.setitem(HGEMM.kernels, "cpu_naive", kernel)
    case = HGEMM.case("cpu_naive", "float16", SHAPE)
    row = Supervisor(a_shard(tmp_path, [case]), tmp_path / "log").run(case, None)
    assert (row["status"], row["message"]) == (
        "unsupported",
        "its rule of what it supports fails: KeyError: 'no such axis'",
    )
    with pytest.raises(RuleFailed, match="no such axis"):
        state(case, None)


def test_no_process_says_what_is_unsupported() -> None:
    reply = {"row": {"status": "unsupported", "message": "supports no other shape"}}
    row = derive_columns(HGEMM.case("cpu_naive", "float16", SHAPE), reply, FAST, None)
    assert (row["status"], row["message"]) == (
        "dishonest",
        "malformed reply from the kernel's process: ValueError('unsupported')",
    )


REPLIES = {
    "containers": b"[" + b"[{}]," * (MOST_CONTAINERS // 2) + b"[]]",
    "deep": b"[" * (MOST_CONTAINERS + 1),
    "values": b"[" + b"1," * (MOST_VALUES + 1) + b"1]",
    "bytes": b'"' + b"a" * (MOST_BYTES + 1) + b'"',
}


@pytest.mark.parametrize("what", REPLIES)
def test_a_reply_beyond_the_limits_is_not_parsed(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_text("")
    process = Lying(lambda nonce: b"", tmp_path / "log")
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed"))
    line = REPLIES[what]
    process._replies.close()
    process._replies = os.fdopen(os.memfd_create("reply"), "r+b", buffering=0)
    process._replies.write(line + b"\n")
    process._replies.seek(0)
    with pytest.raises(
        Died, match=rf"where only the harness answers: a reply has .*{what if what != 'deep' else 'containers'}"
    ):
        process.receive(60.0)


@pytest.mark.slow
def test_an_honest_kernel_beside_them_is_measured(foreign: Path, run_shard, tmp_path: Path) -> None:
    names = [*TRITON, *CPP, "sound_one"]
    rows = {row["kernel"]: row for row in run_shard(names, extra=[str(foreign)])}
    assert list(rows) == names
    assert rows["sound_one"]["status"] in store.MEASURED
    assert {rows[name]["status"] for name in CPP} == {"compile_error"}
