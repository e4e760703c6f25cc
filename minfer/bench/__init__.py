"""Measuring: is the kernel right (`verify`), how long does it take (`clock`, `measure`), and how sure is that (`stats`)."""

RULES = 3  # raised when what is measured changes: rows of other rules are not resumed
JUDGE_RULES = 3  # the same for the judge: raised when what it measures, or what it accuses of, changes


def rules_of(guarantee: str | None) -> int:
    """The version of all rules by which a row with this guarantee was measured."""
    return RULES + 1000 * JUDGE_RULES if (guarantee or "").startswith("judged") else RULES
