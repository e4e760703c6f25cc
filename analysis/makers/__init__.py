"""What makes pages from rows, a module each."""
