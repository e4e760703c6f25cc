"""From rows (parquet) to tables, plots, pages and the report. Needs neither torch nor a GPU."""

if __name__ != "minfer.analysis":  # a module that is imported under two names exists twice
    raise ImportError(f"{__name__} is minfer.analysis: import it as that")
