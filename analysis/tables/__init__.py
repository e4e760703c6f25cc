"""Tables and pages in Markdown."""
