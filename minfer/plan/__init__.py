"""From a request to cases and shards: what will be run, and what is left out and why."""
