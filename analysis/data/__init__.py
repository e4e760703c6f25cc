"""Rows before they are shown: found, read, put on one clock and under one peak, compared with each other."""
