"""The picture and the table of each script that records what is no row."""
