"""Plots of an op's rows, and the modules that style and save plots."""
