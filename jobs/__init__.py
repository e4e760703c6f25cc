"""How work reaches a node: submitit's executors, the container's command, node-local scratch; and what becomes of it."""
