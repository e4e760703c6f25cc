"""`minfer.specialise`: which sizes share a variant, and which are worth one."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer.specialise import Policy, Span, exact, powers_of_two, ranges
from minfer.specialise.buckets import Buckets, named
from minfer.specialise.policy import Ledger

# Buckets


@given(st.integers(1, 1 << 40))
def test_a_size_is_in_its_span_and_all_of_a_span_have_it(size: int) -> None:
    for buckets in (exact, powers_of_two, ranges(16, 64, 1000)):
        (span,) = buckets(size)
        assert span.low <= size <= span.high
        assert buckets(span.low) == buckets(span.high) == (span,)


def test_spans_are_what_their_names_say() -> None:
    assert exact((4, 128)) == (Span(4, 4), Span(128, 128))
    assert [powers_of_two(n)[0] for n in (1, 2, 3, 4, 5, 8, 9)] == [
        (1, 1), (2, 2), (3, 4), (3, 4), (5, 8), (5, 8), (9, 16)
    ]  # fmt: skip
    assert [named("ranges:16,64")(n)[0] for n in (1, 16, 17, 64, 65)] == [
        (1, 16),
        (1, 16),
        (17, 64),
        (17, 64),
        (65, 65),
    ]
    for wrong in ("ranges:", "ranges:64,16", "all"):
        with pytest.raises(ValueError, match="ranges"):
            named(wrong)


# What is asked for


def keys(ledger: Ledger, *calls: tuple[int, int]) -> tuple[list[int], list[int], list[int]]:
    """What is decided after sizes were called so often, as the sizes themselves."""
    ledger.count(Counter(dict(calls)))
    wanted, again, drop = ledger.decide()
    return [k[0].low for k in wanted], [k[0].low for k in again], [k[0].low for k in drop]


def test_a_key_is_asked_for_once_and_only_from_the_threshold_on() -> None:
    ledger = Ledger(Policy(threshold=100), exact)
    assert keys(ledger, (8, 99), (9, 100), (7, 500)) == ([7, 9], [], [])
    assert keys(ledger, (8, 1), (9, 1000)) == ([8], [], [])
    assert keys(ledger, (7, 1000), (8, 1000), (9, 1000)) == ([], [], [])


def test_a_key_that_came_to_nothing_is_not_asked_for_again_and_frees_its_place() -> None:
    ledger = Ledger(Policy(threshold=1, budget=1), exact)
    assert keys(ledger, (8, 10)) == ([8], [], [])
    assert keys(ledger, (9, 500)) == ([], [], [])  # 8 is on its way: it makes no room
    ledger.settle(exact(8), made=False)
    assert keys(ledger, (8, 1000)) == ([9], [], [])


def test_the_least_used_variant_makes_room_and_comes_back_without_a_compile() -> None:
    ledger = Ledger(Policy(threshold=10, budget=2), exact)
    assert keys(ledger, (1, 100), (2, 50)) == ([1, 2], [], [])
    for size in (1, 2):
        ledger.settle(exact(size), made=True)
    assert keys(ledger, (3, 40), (1, 100), (2, 0)) == ([], [], [])  # 40 calls are not clearly more than 25
    assert keys(ledger, (3, 100), (1, 100)) == ([3], [], [2])
    ledger.settle(exact(3), made=True)
    assert len(ledger.live) == 2
    assert keys(ledger, (2, 5000), (3, 1)) == ([], [2], [3])
    assert len(ledger.asked) == 3


def test_no_more_is_asked_for_than_a_process_may_load() -> None:
    ledger = Ledger(Policy(threshold=1, most_compiles=3), exact)
    assert len(keys(ledger, *((n, 10) for n in range(1, 10)))[0]) == 3
    assert keys(ledger, (20, 1000)) == ([], [], [])


@given(st.lists(st.lists(st.integers(1, 30), max_size=60), max_size=12), st.integers(1, 5))
def test_the_budget_holds_whatever_is_called(looks: list[list[int]], budget: int) -> None:
    ledger = Ledger(Policy(threshold=5, budget=budget), exact)
    asked: list[object] = []
    for number, sizes in enumerate(looks):
        ledger.count(sizes)
        wanted, _, _ = ledger.decide()
        asked += wanted
        for key in wanted:
            ledger.settle(key, made=number % 3 != 2)
        assert len(ledger.live) <= budget
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(
    ("given", "takes"),
    [
        ({"budget": 0}, "an int from 1 as"),
        ({"threshold": "100"}, "an int from 1 as"),
        ({"threshold": float("nan")}, "an int from 1 as"),
        ({"every_calls": -1}, "an int from 0 to 65536 as"),
        ({"every_calls": 1 << 17}, "an int from 0 to 65536 as"),  # more calls than are kept: there would be no look
        ({"every_s": -0.5}, r"seconds up to 1e\+06 as"),
        ({"every_s": float("inf")}, r"seconds up to 1e\+06 as"),
        ({"build_s": 0}, r"seconds up to 1e\+06 as"),
    ],
)
def test_a_policy_without_a_meaning_is_refused(given: dict[str, Any], takes: str) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=rf"^a policy takes {takes} its {name}, got {value!r}$"):
        Policy(**given)


@pytest.mark.parametrize("buckets", [exact, powers_of_two, ranges(16, 64)])
def test_what_is_no_size_has_no_bucket(buckets: Buckets) -> None:
    for wrong in ("20", 20.0, None, (4, 2.5)):
        with pytest.raises(
            TypeError, match=rf"^a size is a whole number, or a tuple of them, got {re.escape(repr(wrong))}$"
        ):
            buckets(wrong)  # type: ignore[arg-type]
    assert buckets(np.int64(20)) == buckets(20)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^a size is a whole number"):
        ranges("16")  # type: ignore[arg-type]
