"""The order in which a run times its cases. The headline comes first, so that a run that is interrupted early leaves a useful
table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from minfer.ops import Case, Op
from minfer.rows.problems import representative_problem


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
