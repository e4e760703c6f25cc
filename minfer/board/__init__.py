"""Kernels that others wrote: seasons of hidden problems, judged submissions, an archive, ranks and pages.

A board is a folder; it needs no server. `folder` lists its files, `season` draws the problems, `submit` has a submission
judged, `score` ranks, `answer` writes the answer to the submitter, `near` searches the archive, and `page` writes the site.
"""
