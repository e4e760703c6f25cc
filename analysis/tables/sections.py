"""What the tables say of one op on one device: its page, its line in the README's table of ops, and its headline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from minfer.analysis.data.others import best_other, verdict
from minfer.analysis.data.prepare import REFERENCE
from minfer.analysis.tables.markdown import escape, pluralise, table_lines
from minfer.analysis.tables.overview import CONF, by_group, overview_lines
from minfer.analysis.tables.problem import (
    LEGEND,
    MESSAGE,
    MORE_LEGEND,
    OTHER_LEGEND,
    fastest_of_ours,
    format_shares,
    headline,
    ladder_lines,
    more_columns,
    percent,
    percent_of_other,
    problem_lines,
    title,
)
from minfer.rows import store
from minfer.rows.problems import number
from minfer.rows.rules import REGIMES

REST = "## Every other problem"  # where a page goes on with what its first part does not show
OPS_HEADER = [
    "Op",
    "Fastest of ours",
    "Problem",
    "% of PyTorch, cold",
    "% of PyTorch, steady",
    "% of the best other, cold",
    "All problems",
    "Tables",
]
README_HEADER = ["Op", "Largest problem", "Ours, in % of the strongest other", "All problems: faster, tie, slower"]
README_LEGEND = (
    "The *strongest other* is the fastest of PyTorch, torch.compile and the libraries that were timed at that problem: its time"
    " divided by that of our fastest kernel, both cold (caches flushed before each call), with the 95 % confidence interval."
    " Where one call of it launches several kernels, their number is in brackets. A *tie* is a difference below 1 %, or within"
    " the noise."
)
VERDICTS = ("faster", "tie", "slower")
OPS_LEGEND = (
    "- *% of PyTorch*: PyTorch's time divided by the kernel's, both timed in the same rounds.\n"
    "- *cold*: caches are flushed before each call; in brackets is the 95 % confidence interval. *steady*: calls follow each"
    " other until the clock has settled; in brackets are the lowest and the highest of the ratios of neighbouring blocks.\n"
    "- *% of the best other*: the same, against the fastest of torch.compile and the libraries that were timed. There is a dash"
    " where none of these was timed, and where PyTorch is faster than all of them.\n"
    "- *Problem*: one problem that stands for the op: the largest, and among equals the one with most kernels. Where several"
    " square problems were timed, it is a square one, unless another does much more work.\n"
    "- *All problems*: where our fastest kernel wins, ties or loses against the best other that was timed (cold). A *tie*"
    " is a difference below 1 %, or within the noise. *Not compared*: no kernel of ours supports the problem, or none was timed"
    " there."
)


@dataclass(frozen=True)
class Where:
    """How a page links to others: what goes before the name of an op's page and before that of a device's folder."""

    folder: Path  # that has the pages of the ops, docs/<op>.md
    docs: str
    results: str


@dataclass(frozen=True)
class Section:
    """One op on one device."""

    op: str
    device: str
    origin: str  # a sentence
    problems: dict[str, list[store.Row]]  # those that are shown, in order
    headline: str | None  # the representative one; None where no kernel supports any
    count: int
    left_out: int  # problems that no kernel supports

    @property
    def page(self) -> Path:
        """Where its page belongs, below the folder of the pages."""
        return Path(store.slug(self.device)) / f"{store.slug(self.op)}.md"

    @property
    def title(self) -> str:
        return f"{escape(self.op)} on {escape(self.device)}"

    @property
    def has_more(self) -> bool:
        """Whether there are figures of workspace or energy."""
        return any(more_columns(rows, regime) for rows in self.problems.values() for regime in REGIMES)

    @property
    def best(self) -> store.Row | None:
        """The row of our fastest kernel at the representative problem."""
        return fastest_of_ours(self.problems[self.headline]) if self.headline is not None else None

    @property
    def has_others(self) -> bool:
        """Whether some table compares with another kernel than PyTorch's own."""
        return any(best_other(rows, regime) for rows in self.problems.values() for regime in REGIMES)

    @property
    def verdicts(self) -> str:
        """At how many of the shown problems our fastest kernel is faster than whatever else was timed, tied or slower; nothing
        where it was compared at none."""
        best = [(fastest_of_ours(rows), best_other(rows, "cold")) for rows in self.problems.values()]
        found = [verdict(row, other) if row else None for row, other in best]
        counts = Counter(each if each in VERDICTS else "not compared" for each in found)
        named = (*VERDICTS, "not compared") if any(map(counts.get, VERDICTS)) else ()
        return ", ".join(f"{counts[name]} {name}" for name in named if counts[name])

    @property
    def other_baselines(self) -> str:
        """At how many problems ours are compared with another baseline than torch: `hgemm 4 (torch_acc16)`; empty for none."""
        best = (fastest_of_ours(rows) for rows in self.problems.values())
        others = Counter(row["baseline"] for row in best if row and row["baseline"] != REFERENCE)
        said = ", ".join(f"{count} ({escape(name)})" for name, count in sorted(others.items()))
        return f"{escape(self.op)} {said}" if said else ""

    @property
    def rejected_reference(self) -> store.Row | None:
        """The row of torch at the representative problem, where that failed although ours were timed beside it."""
        torch = self.torch
        compared = self.best is not None and self.best["baseline"] == REFERENCE
        return torch if compared and torch and torch["status"] not in store.MEASURED else None

    def page_lines(self) -> list[str]:
        lines = [f"# {self.title}", "", self.origin, "", LEGEND, ""]
        if self.has_others:
            lines += [OTHER_LEGEND, ""]
        if self.has_more:
            lines += [MORE_LEGEND, ""]
        if self.left_out:
            lines += [f"Not run: {pluralise(self.left_out, 'problem')} that no kernel here supports.", ""]
        if self.headline is not None:
            rows = self.problems[self.headline]
            lines += [f"{title(self.headline)}: {said}", ""] if (said := headline(rows)) else []
            lines += problem_lines(self.headline, rows, full=True)
        for group, problems in by_group(self.problems):
            lines += overview_lines(self.op, group, problems)
        others = [name for name in self.problems if name != self.headline]
        lines += [REST, ""] if others else []
        for name in others:
            lines += problem_lines(name, self.problems[name], full=True)
        if more := self.count - len(self.problems):
            lines += [
                f"{pluralise(more, 'more problem')} {'is' if more == 1 else 'are'} in the parquet files only.",
                "",
            ]
        return lines

    @property
    def torch(self) -> store.Row | None:
        """The row of torch at the representative problem."""
        rows = self.problems[self.headline] if self.headline is not None else []
        return next((row for row in rows if row["kernel"] == REFERENCE), None)

    def readme_cells(self, where: Where) -> list[str]:
        """Its line of the README's table."""
        best, share, name = self.best, "—", ""
        if best and self.headline is not None:
            other = best_other(self.problems[self.headline], "cold")
            if other:
                share, name = percent_of_other(best, other, "cold"), other["kernel"]
            elif best["baseline"] == REFERENCE:
                other, share, name = self.torch, percent(best, "cold", self.torch), REFERENCE
            about = [f"{other['launches']} launches"] if other and (other["launches"] or 1) > 1 else []
            about += ["a tie"] if share.endswith(" tie") else []
            joined = (
                "of" if "%" in share else {"tie": "with"}.get(share, "than")
            )  # a verdict alone, as in `faster than torch`
            share = share.removesuffix(" tie") + (f" {joined} {escape(name)}" if name else "")
            share += (f" ({', '.join(about)})" if about else "") + (" ‡" if self.rejected_reference else "")
        link = f"{where.results}{self.page.as_posix()}"
        return [self.link(where), short(self.headline or ""), share, f"[{self.verdicts or 'none compared'}]({link})"]

    def link(self, where: Where) -> str:
        """Its name, with a link to its page if it has one."""
        about = f"{self.op}.md"
        return f"[{escape(self.op)}]({where.docs}{about})" if (where.folder / about).is_file() else escape(self.op)

    def ops_cells(self, where: Where) -> list[str]:
        """Its line of the table of ops."""
        name = self.link(where)
        best, shares, of_other = self.best, ["—", "—"], "—"
        if best:
            rows = self.problems[self.headline or ""]
            shares = [percent(best, regime, self.torch) if number(best, f"{regime}_us") else "—" for regime in REGIMES]
            if self.rejected_reference:
                shares = [share if share == "—" else f"{share} ‡" for share in shares]
            other = best_other(rows, "cold")
            if other:
                of_other = f"{percent_of_other(best, other, 'cold')}, {escape(other['kernel'])}"
        cells = [name, escape(best["kernel"]) if best else "—", short(self.headline or ""), *shares, of_other]
        return [
            *cells,
            self.verdicts or "—",
            f"[{pluralise(self.count, 'problem')}]({where.results}{self.page.as_posix()})",
        ]


def short(problem: str) -> str:
    """A problem as a table's cell has it, of a square one the side once: `bfloat16 · layout=TN · m=n=k=8192`."""
    head, _, shape = problem.rpartition("/")
    sizes = dict(part.split("=", 1) for part in shape.split(",") if "=" in part)
    square = len(sizes) > 1 and len(set(sizes.values())) == 1
    return title(f"{head}/{'='.join(sizes)}={next(iter(sizes.values()))}" if square else problem) or "—"


def headline_lines(section: Section, where: Where) -> list[str]:
    """The result in one sentence with both regimes, and its ladder; empty if no kernel was compared with PyTorch."""
    best = section.best
    if best is None or not (shares := format_shares(best)):
        return []
    what = f"{escape(section.op)} ({short(section.headline or '')})"
    kernel = escape(best["kernel"])
    lines = [f"{escape(section.device)}, {what}: **{kernel}** reaches {shares} of PyTorch's throughput.", ""]
    ladder = ladder_lines(section.problems[section.headline or ""])
    meaning = (
        "Cold, as in the table: single calls with flushed caches. Steady: half a second of calls, at the clock where the card "
        "settles. Each rung is faster than all before it. "
    )
    said = meaning if ladder else ""
    return [*lines, *ladder, f"{said}[All kernels and problems]({where.results}{section.page.as_posix()}).", ""]


@cache
def demonstrations() -> list[str]:
    """The ops of the sweep `demonstrations`, which have a table of their own: each shows one thing that a GPU does."""
    sweep: Any = OmegaConf.load(CONF / "sweep" / "demonstrations.yaml")
    return list(sweep.sweeps)


def readme_lines(found: list[Section], devices: list[str], where: Where) -> list[str]:
    """The README's table of ops on the first of the devices, without demonstrations, and links to the pages of the devices."""
    if not devices:
        return ["No results yet: `python -m minfer.launch` makes them.", ""]
    first = devices[0]
    here = [section for section in found if section.device == first and section.op not in demonstrations()]
    lines = []
    if body := [section.readme_cells(where) for section in here]:
        lines += [README_LEGEND, "", f"**{escape(first)}**", ""]
        lines += [*table_lines(README_HEADER, [":--"] * len(README_HEADER), body), ""]
    lines += note_lines(here)
    links = [f"[{escape(device)}]({where.results}{store.slug(device)}/README.md)" for device in devices]
    return [*lines, f"Steady calls too, with demonstrations, by device: {', '.join(links)}.", ""]


def note_lines(found: Iterable[Section]) -> list[str]:
    """What a table of ops does not say of the kernels that ours are compared with, in a paragraph."""
    notes, others = list[str](), list[str]()
    for section in found:
        others += [section.other_baselines] if section.other_baselines else []
        if torch := section.rejected_reference:
            why = f"{escape(torch['status'])}: {escape((torch['message'] or '').partition(' (')[0], MESSAGE)}"
            notes.append(f"‡ {escape(section.op)}: ours were timed beside torch, but its own row there is {why}.")
    if others:
        notes.append(f"Problems at which ours are compared with another baseline than torch: {'; '.join(others)}.")
    return [" ".join(notes), ""] if notes else []


def device_lines(found: list[Section], device: str, where: Where) -> list[str]:
    """The page of a device: its table of ops."""
    sections = {section.op: section for section in found if section.device == device}
    here = {op: section.ops_cells(where) for op, section in sections.items()}
    shown = [here.pop(op) for op in demonstrations() if op in here]
    lines = [f"# Results on {escape(device)}", "", OPS_LEGEND, ""]
    for name, body in ((escape(device), list(here.values())), (f"{escape(device)}: demonstrations", shown)):
        if body:
            lines += [f"**{name}**", "", *table_lines(OPS_HEADER, [":--"] * len(OPS_HEADER), body), ""]
    return lines + note_lines(sections.values())
