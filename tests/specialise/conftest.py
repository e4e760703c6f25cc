"""For each test of `minfer.specialise`: an op and a cache of its own, and compiles that take no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from minfer.ops.op import REGISTERED
from minfer.specialise import Outcome, Span
from minfer.specialise.background import Background
from tests.specialise import specialised
from tests.specialise.adapting import FASTER

del REGISTERED["doubled"]  # which the other tests of this process must not see


@pytest.fixture(autouse=True)
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTERED, "doubled", specialised.op)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build cache of the test's own, and processes in which a trial that runs through finds a faster variant."""
    monkeypatch.setenv("TESTS_SPECIALISED_TRIAL", "faster")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def llvm() -> None:
    pytest.importorskip("llvmlite")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every variant is faster at once; the list says for which sizes one was compiled, and the variant writes its size."""
    compiled: list[int] = []

    def outcome(self: Background, key: tuple[Span, ...]) -> Outcome:
        compiled.append(key[0].low)
        return FASTER

    monkeypatch.setattr(Background, "outcome", outcome)
    monkeypatch.setattr("minfer.specialise.specialiser.known", lambda *about: None)
    monkeypatch.setattr(
        "minfer.specialise.recipe.Recipe.function", lambda self, key, arch="": lambda y, x: y.fill_(key[0].high)
    )
    return compiled
