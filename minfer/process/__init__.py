"""Processes that may crash, hang or lie; how they are started quickly, and how a shard is told to stop."""
