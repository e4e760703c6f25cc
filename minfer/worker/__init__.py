"""One shard on one node: a supervisor, and the processes that compile, measure and judge for it."""
