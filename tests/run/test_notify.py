"""`notify=` posts to a URL when a run has ended; where that fails, the run has not. That it runs a command is seen in
tests/project/test_pipeline.py."""

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
