"""How work reaches a node: submitit's executors, the container's command, node-local scratch; and what becomes of it."""

if __name__ != "minfer.jobs":  # under a second name Python would load every module twice
    raise ImportError(f"{__name__} is minfer.jobs: import it as that")
