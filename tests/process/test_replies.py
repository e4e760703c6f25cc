"""Replies from processes that may lie: whatever arrives, the supervisor goes on, and only the case in question has a row of
it."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minfer import ops
from minfer.bench import RULES
from minfer.plan.shard import Shard
from minfer.process.death import Died
from minfer.process.remote import Process
from minfer.profilers import _check_finding, _columns
from minfer.rows import store
from minfer.worker import compiler, confinement, supervisor, write_rows
from minfer.worker.compiler import Compiler
from minfer.worker.supervisor import Machine, Supervisor
from tests.conftest import FAST

HGEMM = ops.get("hgemm")
SHAPE = {"m": 8, "n": 8, "k": 8}
MACHINE = Machine({"device": "a CPU", "device_kind": "cpu"}, None, None)
SAID = {
    "status": "ok",
    "seed": 7,
    "rel_l2_error": 1e-4,
    "verified": 5,
    "flags": "",
    "cold_empty_us": 0.1,
    "cold_launch_us": 0.2,
    "cold_late": 0.0,
    "cold_baseline_late": 0.5,
    "cold_waited": 0.1,
    "time_s": 0.5,
}
TIMED = {"cold": [[2e-5, 3e-5, 3e-5]] * 12, "steady": [[2e-5] * 4, [3e-5] * 4, [3e-5] * 4, [2e-5] * 4], "watts": []}
GOOD = {"row": SAID | {"steady_rotations": 4}, **TIMED, "usable": True}
SAMPLES = ("kernel", "work", "lag", "baseline_lag", "baseline", "duplicate", "cold_baseline", "steady_baseline")
JUDGED: dict[str, Any] = {"samples": {name: [2e-5] * 4 for name in SAMPLES} | {"calls": [2.0, 2.0], "waited": [0.01]}}
JUDGED["loaded"] = ["/usr/lib/libexample.so.1"]
ODD: list[Any] = [
    None, True, -1, 0, 1e308, float("nan"), float("inf"), 10**400, "", "ok", "judged", "\x1b[2J", "\ud800", "x" * 5000,
    [], {}, [[]], [None], {"a": {}}, [1e-5] * 3, {"status": "ok"}, "hgemm/other/float16//m=1",
]  # fmt: skip
NAMES = [
    "case",
    "run",
    "kernel",
    "guarantee",
    "judged_us",
    "judged_verdict",
    "cold_us",
    "metrics",
    "phase",
    "nonce",
    "row",
]


def mutated(value: Any, rng: random.Random) -> Any:
    """A copy with one to three changes anywhere in it."""
    made = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        made = _mutate(made, rng)
    return made


def _mutate(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        act = rng.random()
        if act < 0.15:
            del value[name]
        elif act < 0.3:
            value[rng.choice([*NAMES, *store.SCHEMA.names])] = copy.deepcopy(rng.choice(ODD))
        else:
            value[name] = _mutate(value[name], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            del value[place]
        else:
            value[place] = _mutate(value[place], rng)
        return value
    depth = rng.choice((1, 50, 5000))
    if rng.random() < 0.8:
        return copy.deepcopy(rng.choice(ODD))
    nested: Any = 1
    for _ in range(depth):
        nested = [nested]
    return nested


def written(reply: Any, nonce: str, rng: random.Random) -> bytes:
    """The bytes of a reply, at times no reply at all: cut, doubled, in another encoding, under another nonce."""
    try:
        line = json.dumps(reply | {"nonce": nonce} if isinstance(reply, dict) else reply).encode() + b"\n"
    except (RecursionError, ValueError):
        line = b"[" * 100_000 + b"\n"
    act = rng.random()
    if act < 0.6:
        return line
    place = rng.randrange(len(line))
    return rng.choice(
        [
            line[:place],
            line + line,
            line[:place] + bytes(rng.randrange(256) for _ in range(8)) + line[place:],
            line.replace(nonce.encode(), b"0" * 32),
            b'{"phase": "\\u001b[2J", "nonce": "' + nonce.encode() + b'"}\n' + line,
            b"\xff\xfe" + line,
            b"\n",
        ]
    )


def a_shard(folder: Path, cases: list[ops.Case]) -> Shard:
    about = {"name": "0000", "run": "mine", "folder": str(folder), "results": str(folder), "device": "cpu"}
    return Shard(**about, cases=cases, timing=FAST, case_timeout_s=5.0, build_timeout_s=5.0)  # type: ignore[arg-type]


class Lying(Process):
    """A process of which nothing is real but what it answers."""

    def __init__(self, answer: Callable[[str], bytes], log: Path) -> None:
        self.theirs: int | None
        ours, self.theirs = os.pipe()
        self._replies, self._requests = os.fdopen(ours, "rb", buffering=0), open(os.devnull, "w")  # noqa: SIM115
        self.process = SimpleNamespace(pid=1 << 30, poll=lambda: 0, wait=lambda: 0)  # type: ignore[assignment]
        self.log, self.phase, self.answer, self._buffer, self._oom_kills = log, "load", answer, bytearray(), 0
        self._scratch = ""
        self.freezer = SimpleNamespace(kill=lambda: None)  # type: ignore[assignment]

    def send(self, **message: Any) -> None:
        super().send(**message)
        if self.theirs is None:  # asked again after an unconverged row: a process that has ended says nothing more
            return
        answer = self.answer(self._nonce)
        os.set_blocking(self.theirs, False)
        os.write(self.theirs, answer[:60_000])
        os.close(self.theirs)
        self.theirs = None


def hash_sources_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same for every reply, and take a third of a row's time."""
    source = write_rows.fingerprint(HGEMM.kernels["cpu_naive"], MACHINE.arch, RULES)
    monkeypatch.setattr(write_rows, "fingerprint", lambda *_: source)


def fuzzed(count: int, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each status came of so many mutated replies of the child and of the judge."""
    log = folder / "log"
    log.write_text("\x1b[31mlast words\n")
    cases = [HGEMM.case("cpu_naive", "float16", SHAPE)]
    shard = a_shard(folder, cases)
    confined = confinement.make_sandbox(shard)  # resolves dozens of paths, the same for every reply
    monkeypatch.setattr(confinement, "make_sandbox", lambda _: confined)
    hash_sources_once(monkeypatch)
    rows: list[tuple[store.Row, bool]] = []
    for number in range(count):
        rng = random.Random(seed + number)
        child_lies = number % 3 < 2

        def child(nonce: str, rng: random.Random = rng, lies: bool = child_lies) -> bytes:
            return (
                written(mutated(GOOD, rng), nonce, rng)
                if lies
                else json.dumps(GOOD | {"nonce": nonce}).encode() + b"\n"
            )

        def judge(nonce: str, rng: random.Random = rng) -> bytes:
            return written(mutated(JUDGED, rng), nonce, rng)

        shard.untrusted = number % 3 > 0
        one = Supervisor(shard, log)
        one.prepare = lambda child=child: Lying(child, log)  # type: ignore[method-assign]
        monkeypatch.setattr(supervisor, "Process", lambda *_, judge=judge, **__: Lying(judge, log))
        row = write_rows.complete(shard, MACHINE, None, cases[0], one.run(cases[0], None), 0.0)
        rows.append((row, shard.untrusted))
        one.end()
    found: dict[str, int] = {}
    table = store.to_table([row for row, _ in rows])
    for back, (_, untrusted) in zip(table.to_pylist(maps_as_pydicts="strict"), rows, strict=True):
        assert (back["case"], back["run"], back["kernel"]) == (cases[0].key, "mine", "cpu_naive")
        assert back["status"] in store.STATUSES
        assert back["status"] in store.MEASURED or all(back[name] is None for name in supervisor.TIMED)
        judged = (back["guarantee"] or "").startswith("judged, ")
        assert not judged or (untrusted and back["judged_us"] is not None)
        assert back["judged_us"] is None or judged
        message = back["message"] or ""
        assert message.isprintable(), message
        found[back["status"]] = found.get(back["status"], 0) + 1
    return found


def test_mutated_replies_cost_their_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fuzzed(600, 1, tmp_path, monkeypatch)
    assert found.keys() >= {"ok", "dishonest", "crashed"}  # some changes do no harm


@pytest.mark.slow
def test_ten_thousand_mutated_replies_cost_their_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzzed(10_000, 1000, tmp_path, monkeypatch)


def test_mutated_replies_of_a_compiler_are_builds_or_say_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reply and a library come to can be written in a row; `compile_error` says why where there is none."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler.sandboxed, "find", lambda *_: None)
    (tmp_path / "logs").mkdir()
    (tmp_path / "log").write_text("")
    case = HGEMM.case("cpu_naive", "float16", SHAPE)
    shard = a_shard(tmp_path, [case])
    built = {"library": "/a.so", "seconds": 1.5, "registers": 40, "shared_bytes": 0, "local_bytes": None}
    hash_sources_once(monkeypatch)
    found = {"built": 0, "refused": 0}
    for seed in range(600):
        rng = random.Random(seed)
        good = {"built": built} if seed % 3 else {"error": "an error", "log": "of many lines"}

        def process(_: str, log: Path, fds: list[int], *__: Any, rng: random.Random = rng, good: Any = good) -> Lying:
            os.pwrite(fds[0], rng.choice([b"", *[b"a library"] * 4]), rng.choice([0, 0, 0, 0, 1 << 31]))
            return Lying(lambda nonce: written(mutated(good, rng), nonce, rng), tmp_path / "log")

        monkeypatch.setattr(compiler, "Process", process)
        done = Compiler(shard, "", lambda **_: None)._apart("hgemm", "cpu_naive")
        columns = {"status": "compile_error", "message": done}
        if not isinstance(done, str):
            columns = {name: value for name, value in vars(done).items() if name in store.SCHEMA.names}
            columns |= {"status": "ok", "build_s": done.seconds}
            assert Path(done.library).is_file()
        found["refused" if isinstance(done, str) else "built"] += 1
        store.to_table([write_rows.complete(shard, MACHINE, None, case, columns, 0.0)])
    assert min(found.values()) > 20


def test_mutated_findings_of_a_profiler_are_findings_or_say_why_not(tmp_path: Path) -> None:
    good = {"metrics": {"registers": 4.0}, "functions": {"sm_89": "f"}, "why": "ok"}
    (tmp_path / "log").write_text("")
    for seed in range(600):
        rng = random.Random(seed)
        process = Lying(lambda nonce, rng=rng: written(mutated(good, rng), nonce, rng), tmp_path / "log")
        with contextlib.suppress(Died):
            store.to_table([{"case": "a", **_columns("static", _check_finding(process.ask(5.0)))}])


def test_a_reply_without_an_end_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_text("")
    monkeypatch.setattr("minfer.process.remote.MOST_BYTES", 1000)
    process = Lying(lambda nonce: b"x" * 2000, tmp_path / "log")
    with pytest.raises(Died, match="wrote to the result pipe"):
        process.ask(5.0)
