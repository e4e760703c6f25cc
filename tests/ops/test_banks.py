"""The arithmetic of the demonstration `banks`: the wavefronts that it predicts, and the maps of TMA's swizzles."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minfer import ops
from minfer.bench.device import capability, pick
from minfer.build import toolchain
from minfer.ops import banks
from minfer.profilers import Job, ncu
from tests.conftest import ROOT
from tests.emulator import Emulated, compiled
from tools import print_swizzle

LAYOUTS = {"v01_plain": "plain", "v02_padded": "padded", "v03_swizzled": "swizzled"}
DOCUMENT = (ROOT / "docs" / "banks.md").read_text()


@pytest.mark.parametrize("layout", LAYOUTS.values())
@pytest.mark.parametrize("words", [1, 2, 4])
def test_a_layout_gives_every_word_a_place_of_its_own_and_keeps_pieces_whole(layout: str, words: int) -> None:
    places = [banks.place(word, layout, words) for word in range(32 * 32)]
    assert len(set(places)) == len(places) and max(places) < 32 * (32 + words)
    for piece in range(0, len(places), words):
        assert places[piece] % words == 0
        assert places[piece : piece + words] == list(range(places[piece], places[piece] + words))


def cells_of(part: str) -> dict[tuple[str, str], list[str]]:
    """The cells of a table by width in bytes and layout, one for each stride."""
    rows = re.findall(r"^\| (\d+) bytes, (\w+) \|(.*)\|$", part, re.MULTILINE)
    return {(width, layout): [cell.strip() for cell in cells.split("|")] for width, layout, cells in rows}


def test_the_table_of_the_page_is_that_of_the_formula_and_the_measured_one_follows_it() -> None:
    predicted, measured = map(cells_of, DOCUMENT.split("## Measured"))
    assert len(predicted) == 9 and predicted.keys() == measured.keys()
    for (width, layout), cells in predicted.items():
        words = int(width) // 4
        found = [None if s % words else banks.wavefronts(s, layout, words) for s in banks.STRIDES]
        assert cells == ["" if count is None else str(count) for count in found]
        for count, cell in zip(found, measured[width, layout], strict=True):
            assert (count is None and not cell) or (count and abs(int(cell) - 100 * count) <= 8)


def test_the_maps_of_the_page_are_those_of_the_formula() -> None:
    for span in print_swizzle.SPANS:
        text = print_swizzle.printed(print_swizzle.expected(span))
        assert text.replace("\n", "\n    ") in DOCUMENT, span


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    if toolchain.toolkit() is None:
        pytest.skip("no headers of a CUDA toolkit that fits this PyTorch")
    return Emulated(print_swizzle.KERNEL, compiled(print_swizzle.KERNEL, tmp_path_factory.mktemp("swizzle")))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("span", print_swizzle.SPANS)
def test_the_emulators_copy_engine_has_the_same_map(span: int, emulated: Callable[..., None]) -> None:
    out, words = torch.full((256,), -1, dtype=torch.int32), torch.arange(256, dtype=torch.int32)
    emulated(out, words, span=span)
    assert print_swizzle.pieces(out) == print_swizzle.expected(span)


def test_a_torn_piece_is_refused() -> None:
    with pytest.raises(RuntimeError, match="tore a 16-byte piece apart"):
        print_swizzle.pieces(torch.arange(256).flip(0))


@pytest.mark.gpu
@pytest.mark.parametrize("span", print_swizzle.SPANS)
def test_gpu_copy_engine_has_the_same_map(span: int) -> None:
    if capability(pick("cuda")) != (9, 0):
        pytest.skip("TMA needs sm_90")
    assert print_swizzle.loaded(span) == print_swizzle.expected(span)


@pytest.mark.gpu
def test_gpu_counts_the_wavefronts_that_the_formula_predicts(tmp_path: Path) -> None:
    op = ops.get("banks")
    cases = [
        op.case(kernel, "float32", {"rows": 1056}, {"width": width, "call": f"stride_{stride}"})
        for kernel in LAYOUTS
        for width, stride in (("4", 1), ("4", 3), ("4", 32), ("8", 2), ("8", 32), ("16", 4), ("16", 32))
    ]
    found = ncu.profile(Job(cases, {"sets": ["bank_conflicts"], "clock_control": "none"}, "cuda", tmp_path, 600))
    for case, counted in zip(cases, found, strict=True):
        assert counted.why == "ok"
        ways = banks.wavefronts(op.call(case)["stride"], LAYOUTS[case.kernel], banks.words(case))
        assert counted.metrics["shared_load_instructions"] == 1056 * banks.ROUNDS
        assert counted.metrics["shared_load_wavefronts"] == pytest.approx(1056 * banks.ROUNDS * ways, rel=0.05), (
            case.key
        )
