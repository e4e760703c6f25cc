"""minfer: GPU kernels for LLM inference, and the pipeline that measures them. Start at `docs/architecture.md`."""
