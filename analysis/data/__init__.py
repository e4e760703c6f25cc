"""Finds and reads rows, puts them on one clock and under one peak, and compares them."""
