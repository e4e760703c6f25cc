"""The door for kernels that others wrote: seasons of hidden problems, submissions that are judged, an archive, ranks, pages.

A board is a folder, without a server. `folder` says what lies where, `season` draws the problems, `submit` has a submission
judged, `score` ranks, `answer` says what came of it, `near` searches the archive, and `page` writes the site.
"""
