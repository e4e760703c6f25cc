"""Measuring: is the kernel right (`verify`), how long does it take (`clock`, `measure`), and how sure is that (`stats`)."""
