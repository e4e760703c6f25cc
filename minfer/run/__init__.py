"""One launch as its user sees it: start it, follow it, sum it up, control it from another shell."""
