"""The order in which a run times its cases. The headline comes first, so that a run that is interrupted early leaves a useful
table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from minfer import ops
from minfer.bench.timing import Timing
from minfer.ops import Case, Op
from minfer.rows.problems import representative_problem

LONG_S = 60.0  # there is a first pass if the steady calls of its cases take longer


def put_headline_first(op: Op, cases: list[Case], unsupported: Collection[str], baseline_first: bool) -> list[Case]:
    """The cases of an op in this order: its headline, other shapes with the same dtype and parameters, then other dtypes and
    parameters, each beginning with the shape of the headline. With `baseline_first` the baseline is the first case of each
    problem. Otherwise the order of the cases is kept."""
    headline = _find_headline(op, [case for case in cases if case.key not in unsupported] or cases)
    setting = lambda case: case.problem.rpartition("/")[0]
    settings = list(dict.fromkeys([setting(headline), *map(setting, cases)]))
    place = {name: index for index, name in enumerate(settings)}
    is_other = lambda case: baseline_first and case.kernel != op.baseline(case)
    shapes = {name: index for index, name in enumerate(dict.fromkeys(c.shape_name for c in [headline, *cases]))}
    return sorted(cases, key=lambda case: (place[setting(case)], shapes[case.shape_name], is_other(case)))


def _find_headline(op: Op, cases: list[Case]) -> Case:
    """A case of the problem that stands for an op, as it does in tables, among those with the first case's dtype and
    parameters. At least one case is needed."""
    first = [case for case in cases if (case.dtype, case.params) == (cases[0].dtype, cases[0].params)]
    kernels, of = Counter(case.problem for case in first), {case.problem: case for case in first}
    chosen = representative_problem(
        [
            {"problem": name, "measured": kernels[name], "flops": op.flops(case), "bytes": op.bytes(case)}
            for name, case in of.items()
        ]
    )
    return of[chosen] if chosen else cases[0]


def put_headlines_first(sweeps: list[list[Case]]) -> list[Case]:
    """The cases of several sweeps, each in its own order: the first problem of every sweep, then the rest."""
    headlines = {(cases[0].op, cases[0].problem) for cases in sweeps}
    everything = [case for cases in sweeps for case in cases]
    return sorted(everything, key=lambda case: (case.op, case.problem) not in headlines)


def find_first_pass(cases: list[Case], timing: Timing) -> list[Case]:
    """The cases of a shard that get cold times before any case gets steady ones: those of the first problem of each op. At a
    problem the baseline comes first, and then the other kernels in reverse order of registration: a ladder's last rungs tell
    most, and its first are so slow that each takes as long as ten others. Empty if the steady calls of these cases take less
    than LONG_S together, because their table is complete soon enough without a first pass."""
    problems: dict[str, str] = {}
    for case in cases:
        problems.setdefault(case.op, case.problem)
    first = [case for case in cases if problems[case.op] == case.problem]
    if len(first) * timing.steady_s < LONG_S:
        return []
    place = {op: {name: index for index, name in enumerate(ops.get(op).kernels)} for op in problems}
    ops_in_order = [*problems]

    def rank(case: Case) -> tuple[int, bool, int]:
        is_other = case.kernel != ops.get(case.op).baseline(case)
        return ops_in_order.index(case.op), is_other, -place[case.op][case.kernel]

    return sorted(first, key=rank)
