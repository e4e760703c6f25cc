"""Checks that the figures of pages and rows agree with each other."""
