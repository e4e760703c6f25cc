"""Functions for users, which choose among measured kernels and build what they choose."""
