"""`notify=` runs a command, or posts to a URL, when a run has ended; where that fails, the run has not."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from minfer.jobs.run import Run
from minfer.run import notify
from minfer.run.progress import RunProgress
from tests.conftest import launch

TINY = ["+sweep=hgemm", "kernel=[cpu_naive]", "cluster=local", "device=cpu", "shape=tiny", "dtype=float16", "timing=quick",
        "timing.warmup_s=0", "timing.looks=[5]", "timing.precision=0.9", "timing.cold_cap_s=1"]  # fmt: skip


def test_a_command_is_told_of_the_run_at_its_end(tmp_path: Path) -> None:
    words = [*TINY, f"results={tmp_path / 'results'}", f"runs={tmp_path / 'runs'}"]
    command = (
        f"echo $MINFER_RUN,$MINFER_ROWS,$MINFER_CASES,$MINFER_SHARDS >> {tmp_path}/told; ls $MINFER_FOLDER; exit 3"
    )
    done = launch(*words, f"notify={command}")
    (folder,) = (tmp_path / "runs").iterdir()
    assert (tmp_path / "told").read_text() == f"{folder.name},1,1,1 done\n"
    assert done.returncode == 0 and "config.yaml" in done.stdout
    assert "Note: the command of notify ended with exit status 3." in done.stdout


class Server(http.server.BaseHTTPRequestHandler):
    told: list[dict[str, str]] = []  # noqa: RUF012
    status = 200

    def do_POST(self) -> None:
        Server.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(Server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Server.told.clear()
    yield f"http://127.0.0.1:{server.server_port}/hook"
    server.shutdown()
    server.server_close()


def test_a_url_is_posted_one_line(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunProgress(Run(tmp_path))
    assert notify.notify(url, run) is None
    assert [list(told) for told in Server.told] == [["text"]]
    assert Server.told[0]["text"].startswith(f"minfer {tmp_path.name} has ended: 0 of 0 rows")
    monkeypatch.setattr(Server, "status", 500)
    assert (notify.notify(url, run) or "").startswith("notify failed, and the run did not: HTTP Error 500")


def test_what_cannot_be_reached_or_hangs_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "PATIENCE_S", 0.2)
    run = RunProgress(Run(tmp_path))
    for target in ("http://127.0.0.1:1/", "http://[", "sleep 30"):
        told = notify.notify(target, run)
        assert told and told.startswith("notify failed, and the run did not: ") and "\n" not in told
    assert notify.notify("no-such-command 2>/dev/null", run) == "the command of notify ended with exit status 127"
