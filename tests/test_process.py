"""A process seen from outside: what it says, and what is left when it is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minfer.process import Died, Process


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `echo` that answers each request with itself, and dies at `die`."""
    root = Path(__file__).resolve().parents[1]
    code = "import os\nfrom minfer.process import serve\n"
    code += "serve(lambda request, say: os._exit(3) if 'die' in request else (say(phase='echoing'), request)[1])\n"
    (tmp_path / "echo.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root)]))
    return tmp_path / "log"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_requests_are_answered_and_nothing_stays_open(echo: Path) -> None:
    before = descriptors()
    for number in range(3):
        process = Process("echo", echo)
        assert process.ask(60, number=number) == {"number": number} and process.phase == "echoing"
        process.kill()
        process.kill()  # once more does no harm
        assert descriptors() == before


def test_a_death_says_where_it_happened_and_nothing_stays_open(echo: Path) -> None:
    before = descriptors()
    process = Process("echo", echo)
    with pytest.raises(Died, match="died in the phase 'start' by exit status 3"):
        process.ask(60, die=True)
    assert descriptors() == before
