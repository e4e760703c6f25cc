"""What is a submission, and how it is registered for a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from minfer.board.adapt import find_support
from minfer.board.folder import Board, Entry
from minfer.board.stage import find_kind, find_symbol, read_files, stage
from minfer.plan.config import UserError
from tests.board.making import make_board, make_entry

CPP = b'#include "softmax.h"\nMINFER_SOFTMAX(softmax_mine, minfer::launch)\n'


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return make_board(tmp_path / "board")


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("mine.cpp", CPP, "cpp"),
        ("mine.cu", CPP, "cuda"),
        ("mine.py", b"import triton\n\ndef softmax(y, x, mask):\n    pass\n", "triton"),
        ("mine.py", b"def softmax(y, x, mask):\n    pass\n", "python"),
        ("mine.py", b"softmax = lambda y, x, mask: None\n", "python"),
    ],
)
def test_the_kind_of_a_source(name: str, content: bytes, kind: str) -> None:
    assert find_kind("softmax", name, content) == kind


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("mine.rs", b"", "ends in .cu, .cpp, .py"),
        ("mine.cpp", b"int main() {}", "defines no torch op softmax_mine"),
        ("mine.py", b"def soft(y): pass", r"has no function softmax\(...\)"),
    ],
)
def test_what_is_no_kernel_is_refused(name: str, content: bytes, words: str) -> None:
    with pytest.raises(UserError, match=words):
        find_kind("softmax", name, content)


def test_the_torch_op_may_have_another_name_than_the_file() -> None:
    assert find_symbol("softmax", "fast.cpp", CPP.decode()) == "softmax_mine"


def test_files_that_cannot_be_a_submission(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        read_files([tmp_path / "none.cpp"])
    odd = tmp_path / "a b.cpp"
    odd.write_bytes(CPP)
    with pytest.raises(UserError, match=r"cannot be called 'a b\.cpp'"):
        read_files([odd])


def write(board: Board, name: str, kind: str, file: str, content: bytes) -> Entry:
    entry = make_entry(board, name, kind=kind)
    entry.files = {file: board.keep(content)}
    return entry


def test_two_submissions_of_one_name_stand_in_one_run(board: Board, tmp_path: Path) -> None:
    one, other = (write(board, "mine", "cpp", "mine.cpp", CPP + end) for end in (b"", b"// 2"))
    text = stage(board, [one, other], tmp_path / "run").read_text()
    for entry in (one, other):
        assert f"softmax_mine_{entry.id}" in (tmp_path / "run" / entry.id / "mine.cpp").read_text()
        assert f"name='mine@{entry.id}'" in text
    compile(text, "register.py", "exec")


def test_a_python_submission_is_not_imported_where_it_is_registered(board: Board, tmp_path: Path) -> None:
    from minfer import ops

    content = b"raise RuntimeError('imported')\n\ndef softmax(y, x, mask):\n    pass\n"
    entry = write(board, "mine", "python", "mine.py", content)
    kernels = ops.get("softmax").kernels
    try:
        ops.load_file(stage(board, [entry], tmp_path / "run"))
        with pytest.raises(RuntimeError, match="imported"):
            kernels[entry.kernel].function()
    finally:
        kernels.pop(entry.kernel, None)


@pytest.mark.parametrize(("op", "call"), [("silu_mul", ("forward",)), ("rmsnorm", None), ("softmax", None)])
def test_a_submission_is_for_the_calls_with_the_tensors_of_the_first(op: str, call: tuple[str, ...] | None) -> None:
    """rmsnorm's two calls have the same tensors; silu_mul's backward pass has others, and no submission has to know them."""
    assert find_support(op).get("params", {}).get("call") == call
