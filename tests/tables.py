"""A results folder and a README to make tables from, for the tests of the tables."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

from minfer.analysis import make_tables
from minfer.analysis.makers.tables import BEGIN, END
from minfer.analysis.tables.sections import REST
from minfer.rows import store

H200, EPYC = "NVIDIA H200", "AMD EPYC 9654"
TN = "layout=TN,accumulate=float32"
MARKERS = f"{BEGIN}\n{END}\n"
NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


def row(kernel: str = "torch", us: float | None = 100.0, problem: str = "", **values: Any) -> store.Row:
    """A row of hgemm on an H200: `us` is both regimes' median, the baseline takes 100 µs and the problem 10^9 FLOPs."""
    problem = problem or f"float16/{TN}/m=512,n=512,k=512"
    op = values.get("op", "hgemm")
    made: store.Row = {"run": "r1", "finished": NOON, "case": f"{op}/{kernel}/{problem}", "op": op, "kernel": kernel}
    made |= {"status": "ok", "baseline": "torch", "flops": 1e9, "device": H200, "device_kind": "cuda"}
    made |= {"guarantee": "in-process", "commit": "6738d94f00aabbccddee", "torch": "2.11.0", "driver": "580.95.05"}
    if us is not None:
        for regime in ("cold", "steady"):
            made |= {f"{regime}_us": us, f"{regime}_tflops": 1e9 / us / 1e6, f"{regime}_speedup": 100 / us}
            made |= {f"{regime}_baseline_us": None if kernel == "torch" else 100.0}
    return made | values


def other(op: str, metric: str, kernel: str, us: float, problem: str, **values: Any) -> store.Row:
    """A row of an op with another metric, which does no FLOPs: 10^6 of the metric's unit a call, and 10^6 bytes."""
    dtype, params, shape = problem.split("/")
    pairs = [dict(part.split("=") for part in text.split(",") if part) for text in (params, shape)]
    named: dict[str, Any] = {"params": pairs[0], "shape": {axis: int(size) for axis, size in pairs[1].items()}}
    rates = {f"{regime}_rate": 1e6 / us for regime in ("cold", "steady")}
    no_flops = {"flops": 0.0, "bytes": 1e6, "cold_tflops": 0.0, "steady_tflops": 0.0}
    return row(kernel, us, problem, op=op) | {"metric": metric, "dtype": dtype} | named | rates | no_flops | values


class Workspace:
    """A results folder and a README in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.results, self.readme, self.pages = folder / "results", folder / "README.md", folder / "docs" / "results"
        self.results.mkdir()
        self.readme.write_text(MARKERS)

    def write(self, *rows: store.Row, name: str = "a") -> Path:
        path = self.results / f"{name}.parquet"
        store.write(store.to_table(rows), path)
        return path

    def run(self, *arguments: object) -> int:
        where = ["--results", self.results, "--readme", self.readme, "--pages", self.pages]
        return make_tables.main([str(argument) for argument in [*where, *arguments]])

    def page(self, device: str = H200, op: str = "hgemm") -> str:
        return (self.pages / store.slug(device) / f"{op}.md").read_text()

    def device_page(self, device: str = H200) -> Path:
        """The page with a device's table of ops."""
        return self.pages / store.slug(device) / "README.md"

    def op_pages(self) -> list[Path]:
        return [page for page in self.pages.glob("*/*.md") if page.stem != "README"]

    def text(self) -> str:
        """What the pages of ops show first, by op: the representative problem and the overviews."""
        pages = sorted(self.op_pages(), key=lambda page: (page.stem, page))
        return "\n".join(page.read_text().partition(REST)[0] for page in pages)

    def tables(self) -> list[list[list[str]]]:
        """The cells of every table of `text`, header included."""
        tables: list[list[list[str]]] = [[]]
        for line in self.text().splitlines():
            if line.startswith("|"):
                tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
            elif tables[-1]:
                tables.append([])
        return [[table[0], *table[2:]] for table in tables if table]

    def cells(self, *rows: store.Row) -> list[list[str]]:
        """The body of the first table that is made of `rows`."""
        self.write(*rows)
        assert self.run() == 0
        return self.tables()[0][1:]
