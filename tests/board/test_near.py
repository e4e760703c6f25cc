"""The measure of nearness."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from minfer.board import near
from minfer.board.folder import Board
from tests.board.making import fill, make_board, make_entry

OPS = (
    "softmax",
    "rmsnorm",
    "layernorm",
    "hgemm",
    "gated_unit",
    "decode_attention",
    "silu_mul",
    "rope",
    "embedding",
    "axpby",
)
DTYPES = ("float16", "bfloat16", "float32")


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return make_board(tmp_path / "board")


def about(dtype: str, **shape: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "params": {}}


def test_a_known_sibling_comes_first_in_nine_of_ten(board: Board) -> None:
    """A sibling is the same kernel at a task whose sizes differ by at most a factor of two, with a similar mix of instructions;
    forty other submissions are of other ops, dtypes, sizes or instructions."""
    draw, found, tries = random.Random(3), 0, 40
    mixes = [
        {"vector": draw.uniform(0, 90), "fma": draw.uniform(0, 40), "calls": draw.uniform(0, 9)} for _ in range(tries)
    ]
    made = []
    for number in range(tries):
        op, dtype = draw.choice(OPS), draw.choice(DTYPES)
        task = about(dtype, rows=2 ** draw.randint(0, 12), n=2 ** draw.randint(5, 15))
        made.append(make_entry(board, f"k{number}", op=op, task=task, opcodes=mixes[number], when=2000.0 + number))
    for entry in made:
        shape = {axis: max(1, round(size * draw.uniform(0.5, 2))) for axis, size in entry.task["shape"].items()}
        mix = {name: share * draw.uniform(0.9, 1.1) for name, share in entry.opcodes.items()}
        task = near.Task(entry.op, entry.task["dtype"], shape, mix)
        found += near.find(task, made, 1)[0][1].id == entry.id
    assert found >= 0.9 * tries


def test_the_parts_of_the_measure(board: Board) -> None:
    entry = make_entry(board, "mine", task=about("float16", rows=64, n=4096), opcodes={"vector": 1.0})
    same = near.Task("softmax", "float16", {"rows": 64, "n": 4096})
    assert near.distance(same, entry) == 0
    assert near.distance(near.Task("softmax", "float16", {"rows": 64, "n": 8192}), entry) == pytest.approx(0.125)
    assert near.distance(near.Task("softmax", "bfloat16"), entry) == near.OTHER_DTYPE
    assert near.distance(near.Task("softmax", "float32"), entry) == near.OTHER_WIDTH
    assert near.distance(near.Task("layernorm"), entry) == near.OTHER_OP
    assert near.distance(near.Task("hgemm"), entry) == near.OTHER_FAMILY
    assert near.distance(near.Task("softmax", opcodes={"fma": 1.0}), entry) == pytest.approx(1.0)


def test_every_op_is_in_one_family() -> None:
    members = [op for family in near.FAMILIES.values() for op in family]
    assert len(members) == len(set(members)) and near.family("their_op") == "their_op"


def test_of_equal_distances_the_faster_comes_first(board: Board) -> None:
    fill(board, 30)
    found = near.find(near.Task("softmax", "bfloat16"), board.entries(), 5)
    scores = [entry.score["value"] for _, entry in found]
    assert len(found) == 5 and scores == sorted(scores, reverse=True)
