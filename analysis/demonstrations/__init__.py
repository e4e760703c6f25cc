"""The plot and the table of each script in `benchmarks/` that writes a format of its own instead of rows."""
