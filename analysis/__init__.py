"""Makes tables, plots, pages and the report from rows (parquet). Needs neither torch nor a GPU."""

if __name__ != "minfer.analysis":  # under a second name Python would load every module twice
    raise ImportError(f"{__name__} is minfer.analysis: import it as that")
