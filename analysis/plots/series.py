"""Which problems of an op stand beside each other in a plot: those of one setting, series of growing sizes, and the one
problem that represents all. Rows have a `problem`: the case's key without op and kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minfer.analysis.plots.style import printable
from minfer.rows.problems import number, representative_problem, square_problems, work_column
from minfer.rows.store import Row

LEAST_SIZES = 3  # of a series that a plot shows: a line between two points says no more than a table
TOKENS = ("batch", "new")  # the axes whose product is the tokens of a call: sequences, and how many each gets
MODEL = frozenset({"heads", "kv_heads", "head_dim", "rotary_dim", "hidden", "ffn", "experts", "vocab"})
WORDS = {"seq": "sequence length", "longest": "sequence length"}  # what a reader calls an axis


@dataclass(frozen=True)
class Series:
    """Problems of different sizes in one respect: the side of a square, or one axis while all others stay. Axes that are
    equal in all rows, and those of one name, such as `seq_q` and `seq_kv`, where they are equal, count as one."""

    axis: str  # whose size it is; of several equal ones the first
    label: str  # `m = n = k`, or what a reader calls the axis, or several equal ones together: `sequence length`
    fixed: str  # the other axes: `hidden=4096`; of squares nothing
    rows: list[Row]
    square: bool = False
    times: str = ""  # another axis: then the size is the product of both

    @property
    def sizes(self) -> list[int]:
        return sorted({self.size(row) for row in self.rows})

    @property
    def over(self) -> str:
        """What a plot of it is over, in words."""
        return "the size of square problems" if self.square else self.label

    def size(self, row: Row) -> int:
        return row["shape"][self.axis] * (row["shape"][self.times] if self.times else 1)


def series(rows: Iterable[Row]) -> Series | None:
    """The series to plot: the squares, else the axis and the sizes of the others with most points, of equally many the
    largest problems; one over a size of the model, such as its heads, only where no other has LEAST_SIZES. None where no
    two problems make one."""
    rows = [row for row in rows if row["shape"]]
    if found := squares(rows):
        axes = list(found[0]["shape"])
        return Series(axes[0], " = ".join(axes), "", found, square=True)
    lines: dict[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], list[Row]] = {}
    together = equal_axes(rows)
    for row in rows:
        for group in [*together, *group_alike(row, together)]:
            others = tuple(item for item in row["shape"].items() if item[0] not in group)
            if row["shape"][group[0]] > 0:  # as a logarithmic axis needs it
                lines.setdefault((group, others), []).append(row)
    work = work_column(rows)
    made = [
        Series(one[0], name_axes(one), words(list_sizes(dict(others))), line) for (one, others), line in lines.items()
    ]
    made = [one for one in made if len(one.sizes) > 1]

    def rank(one: Series) -> tuple[object, ...]:
        last = len(one.sizes) < LEAST_SIZES or one.axis in MODEL
        return last, -len(one.sizes), -len(one.rows), -max(number(r, work) or 0 for r in one.rows), one.fixed

    return min(made, key=rank, default=None)


def over_tokens(rows: Iterable[Row]) -> Series | None:
    """The series over the tokens of a call, whether of many sequences or of one: where nothing else matters, because the
    bytes are in proportion to them. None elsewhere."""
    rows = [row for row in rows if row["shape"] and number(row, "bytes") and all(row["shape"].get(a) for a in TOKENS)]
    if not rows:
        return None
    shapes = [row["shape"] for row in rows]
    same = {axis: size for axis, size in shapes[0].items() if all(shape.get(axis) == size for shape in shapes)}
    found = Series(TOKENS[0], "tokens", words(list_sizes(same)), rows, times=TOKENS[1])
    each = [row["bytes"] / found.size(row) for row in rows]
    one_a_size = len({tuple(shape.items()) for shape in shapes}) == len(found.sizes)
    return found if one_a_size and max(each) < 1.01 * min(each) and not same.keys() & set(TOKENS) else None


def equal_axes(rows: list[Row]) -> list[tuple[str, ...]]:
    """The axes of rows of one op, those together that have the same size in every row and not the same in all. Axes that some
    rows leave out, because they have a default, are left out here."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for axis in rows[0]["shape"] if rows else ():
        if all(axis in row["shape"] for row in rows):
            groups.setdefault(tuple(row["shape"][axis] for row in rows), []).append(axis)
    found: list[tuple[str, ...]] = []
    for sizes, axes in groups.items():
        found += [tuple(axes)] if len(set(sizes)) > 1 else [(axis,) for axis in axes]
    return found


def group_alike(row: Row, together: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The axes of one name, such as `seq_q` and `seq_kv`, that have the same size in this row, though not in all."""
    stems: dict[str, list[str]] = {}
    for axis in row["shape"]:
        stems.setdefault(axis.partition("_")[0], []).append(axis)
    found = [
        tuple(axes) for axes in stems.values() if len(axes) > 1 and len({row["shape"][axis] for axis in axes}) == 1
    ]
    return [axes for axes in found if axes not in together]


def name_axes(axes: tuple[str, ...]) -> str:
    """What an axis is called, or several equal ones: `sequence length` of `seq_q` and `seq_kv`, else `m = n`."""
    stems = {axis.partition("_")[0] for axis in axes}
    name = stems.pop() if len(axes) > 1 and len(stems) == 1 else " = ".join(axes)
    return WORDS.get(name, name)


def squares(rows: Iterable[Row]) -> list[Row]:
    """The rows of the square problems, where these are a series of their own."""
    rows = list(rows)
    found = square_problems(row["problem"] for row in rows)
    return [row for row in rows if row["problem"] in found]


def side(row: Row) -> int | None:
    """The length of a square problem's sides; None of any other."""
    lengths = set((row["shape"] or {}).values())
    length = lengths.pop() if len(lengths) == 1 and len(row["shape"]) > 1 else None
    return length if length and length > 0 else None


def representative(rows: list[Row]) -> list[Row]:
    """The rows of the problem that stands for all, the same one as in the tables."""
    problems: dict[str, list[Row]] = {}
    for row in rows:
        problems.setdefault(row["problem"], []).append(row)
    first = {name: {work: of[0][work] for work in ("flops", "bytes")} for name, of in problems.items()}
    chosen = representative_problem(
        [{"problem": name, "measured": len(problems[name])} | work for name, work in first.items()]
    )
    return problems[chosen] if chosen else []


def setting(row: Row) -> str:
    """A problem's dtype and parameters: `float16/layout=TN,accumulate=float32`."""
    return row["problem"].rpartition("/")[0]


def words(text: str) -> str:
    return printable(" · ".join(part.replace(",", ", ") for part in text.split("/") if part))


def list_sizes(sizes: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def problem(row: Row) -> str:
    """A row's problem in words, `m=n=k=512` where all sides are equal."""
    return f"{words(setting(row))} · {shape_words(row)}" if side(row) else words(row["problem"])


def shape_words(row: Row) -> str:
    """A row's shape in words: `m=n=k=512`, else `tokens=1, hidden=4096`."""
    if length := side(row):
        return f"{'='.join(row['shape'])}={length}"
    return words(list_sizes(row["shape"] or {}))
