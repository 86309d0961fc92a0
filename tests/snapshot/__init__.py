"""What the framework produces as digests in `snapshot.json`: a refactoring proves with it that it changed nothing.

`framework` holds every name of the framework that is used here; `variants` says which models are opened and how; `cases` holds
requests with every argument and option; `records` turns what comes out into short texts; `run` puts them together.
"""
