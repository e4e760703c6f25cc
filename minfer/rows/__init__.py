"""What one case left behind: the schema of rows, and the parquet files that hold them."""
