"""The interactive report: from rows to the columns, figures and sources that its page has, and the page's own files."""
