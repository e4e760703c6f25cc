"""Do the figures of docs/claims.md agree: the verdicts with the figures, and the shares with the pages of results?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from minfer.analysis.checks.cells import ROUNDED, find_tables, last_digit, parse_amount
from minfer.analysis.claims import CLAIMS, Claim
from minfer.analysis.data.prepare import REFERENCE
from minfer.analysis.tables.markdown import escape
from minfer.rows import store
from minfer.rows.rules import REGIMES

HEADER = ["Row", "Device", "Run", "Figure", "Cold", "Steady"]
SMALL = 0.01  # relative: a ratio of two shares of three digits
OVER = re.compile(r"% of (?P<kernel>\w+)'s throughput")
VERDICT = re.compile(r"\*\*(?:(?P<device>[^:*]+): )?(?P<said>it [^*]+)\.\*\*", re.I)

Shares = Mapping[tuple[str, str, str], float]  # % of PyTorch by problem, regime and kernel


def check_claims(page: Path, shares_of: Mapping[Path, Shares]) -> Iterator[str]:
    """A sentence for each figure that does not agree; nothing for other pages. `shares_of` has the
    shares on each page of results."""
    claims = {escape(claim.said): claim for claim in CLAIMS}
    for part in re.split(r"^## ", page.read_text(), flags=re.M)[1:]:
        said = part.partition("\n")[0]
        rows = [row for _, (header, *body) in find_tables(part) if header == HEADER for row in body]
        if rows and said in claims:
            yield from _check_verdicts(claims[said], part, rows)
            yield from _check_shares(page, rows, shares_of)


def _check_verdicts(claim: Claim, part: str, rows: list[list[str]]) -> Iterator[str]:
    devices = dict.fromkeys(row[1] for row in rows)
    for found in VERDICT.finditer(part):
        chosen = [row for row in rows if found["device"] in (None, row[1])]
        cells = [cell for row in chosen for cell in row[4:] if parse_amount(cell) is not None]
        least, most = (sum(_within(claim, cell, slack) for cell in cells) for slack in (-1, 1))
        holds = re.search(r"holds for (\d+) of (\d+) figures", found["said"])
        count = int(holds[1]) if holds else len(cells) if found["said"].lower() == "it holds" else 0
        if not least <= count <= most or (holds and int(holds[2]) != len(cells)):
            yield f"{claim.said} The page says “{found['said']}”, but {least} of {len(cells)} figures are within the limits"
    if len(devices) != sum(1 for _ in VERDICT.finditer(part)):
        yield f"{claim.said} There are figures of {len(devices)} devices, but not one verdict for each"


def _within(claim: Claim, cell: str, slack: int) -> bool:
    """Whether a figure is within the limits, with half of its last digit for (1) or against it (-1)."""
    value, half = parse_amount(cell) or 0.0, 0.5 * last_digit(cell) * slack
    return (claim.least is None or value + half >= claim.least) and (claim.most is None or value - half <= claim.most)


def _check_shares(page: Path, rows: list[list[str]], shares_of: Mapping[Path, Shares]) -> Iterator[str]:
    for case, device, _, figure, *cells in rows:
        op, kernel, *problem = case.strip("`").split("/")
        over = OVER.fullmatch(figure)
        shares = shares_of.get(page.parent / "results" / store.slug(device) / f"{store.slug(op)}.md", {})
        title = " · ".join(part.replace(",", ", ") for part in problem if part)
        for regime, cell in zip(REGIMES, cells, strict=True):
            keys = [(title, regime, name) for name in (kernel, over["kernel"] if over else "")]
            said = parse_amount(cell)
            if said is None or not all(shares.get(key) for key in keys):
                continue
            computed = 100 * shares[keys[0]] / shares[keys[1]]
            rounded = ROUNDED if keys[1][2] == REFERENCE else SMALL
            if abs(said - computed) > 0.51 * last_digit(cell) + rounded * computed:
                yield f"{case.strip('`')}: {cell} {figure}, {regime}, and its page of results gives {computed:.4g}"
