"""How cases are split into shards, and that planning and splitting stay cheap for many cases."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from minfer import ops
from minfer.bench.timing import Timing
from minfer.plan import cases as matrix
from minfer.plan.config import Config
from tests.plan.test_matrix import SMALL, config


@settings(deadline=None)
@given(
    sizes=st.integers(1, 40),
    kernels=st.lists(st.sampled_from(["torch", "cpu_naive", "cpu_blocked", "v01_naive"]), min_size=1, unique=True),
    jobs=st.integers(1, 50),
)
def test_split_keeps_every_case_once_packs_kernels_and_is_even(sizes: int, kernels: list[str], jobs: int) -> None:
    request = config(timing=Timing(warmup_s=1))
    op = ops.get("hgemm")
    cases = [op.case(name, "float16", SMALL | {"m": m + 1}) for m in range(sizes) for name in kernels]
    unsupported = {case.key: "no" for case in cases if case.kernel == "v01_naive"}
    shards = matrix.split(matrix.Plan(cases, unsupported, {}), request, jobs)
    assert sorted(case.key for shard in shards for case in shard) == sorted(case.key for case in cases)
    assert all(shards) and len(shards) <= jobs
    if jobs == 1:
        assert shards == [cases]
        return
    pairs = [list(dict.fromkeys(case.kernel for case in shard)) for shard in shards]
    assert sum(map(len, pairs)) <= len(kernels) + len(shards) - 1  # a kernel's cases are in neighbouring shards
    case_s, build_s = request.timing.estimate(), matrix.BUILD_S
    seconds = [
        sum(case_s for case in shard if case.key not in unsupported)
        + sum(build_s for name in names if op.kernels[name].needs_build)
        for shard, names in zip(shards, pairs, strict=True)
    ]
    timed = len(cases) - len(unsupported)
    assert max(seconds) <= (timed * case_s + (len(kernels) + jobs) * build_s) / jobs + case_s + build_s + 0.2


def many(count: int) -> Config:
    """A request of `count` cases of one kernel."""
    return config(kernel="torch", shapes=[{"m": list(range(1, count // 20 + 1)), "n": list(range(1, 21)), "k": 8}])


def test_planning_and_splitting_ten_thousand_cases_is_not_quadratic() -> None:
    def seconds(count: int) -> float:
        times = []
        for _ in range(3):
            begin = time.process_time()
            plan = matrix.plan(many(count), "cpu")
            shards = matrix.split(plan, many(count), 16)
            times.append(time.process_time() - begin)
            assert len(plan.cases) == sum(map(len, shards)) == count
        return min(times)

    seconds(1_000)
    assert seconds(10_000) < 30 * seconds(1_000)  # a quadratic step would make it 100
