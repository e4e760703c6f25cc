"""The table of the ten slowest drawn products in docs/hgemm.md has the counters and speeds of the rows that are committed."""

from __future__ import annotations

import re

from minfer.rows import store
from tests.conftest import ROOT

SIDE = r"([^|]+) \| ([\d,]+) \| (\d+) %"
LINE = re.compile(rf"^\| (\d+) × (\d+) × (\d+), (TN|NN) \| {SIDE} \| (\w+): {SIDE} \| ([\d.]+)× \|$", re.MULTILINE)


def test_the_table_says_what_the_rows_say() -> None:
    found = LINE.findall((ROOT / "docs" / "hgemm.md").read_text())
    rows = {
        (*row["shape"].values(), row["params"]["layout"], row["kernel"]): row
        for row in store.rows(store.files(ROOT / "results" / "apart" / "slowest-drawn"))
        if row["dtype"] == "bfloat16"
    }
    for m, n, k, layout, _, cycles, busy, kernel, _, our_cycles, our_busy, speed in found:
        for name, count, percent in (("torch", cycles, busy), (kernel, our_cycles, our_busy)):
            row = rows[int(m), int(n), int(k), layout, name]
            assert count == f"{row['metrics']['ncu.cycles']:,.0f}", (m, n, k, name)
            assert percent == f"{row['metrics']['ncu.tensor_percent']:.0f}", (m, n, k, name)
        assert speed == f"{rows[int(m), int(n), int(k), layout, kernel]['cold_speedup']:.3f}", (m, n, k)
    assert len(found) == 10
