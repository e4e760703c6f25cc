"""Measuring: is the kernel right (`verify`), how long does it take (`clock`, `measure`), and how sure is that (`stats`)."""

RULES = 3  # raised when what is measured changes: rows of other rules are not resumed
