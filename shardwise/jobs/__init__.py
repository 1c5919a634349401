"""What the commands and the Python API do with a recipe: read, plan, train and verify. Each sequence is here once.

``api.py`` and ``cli/`` call these functions. They differ in two things, which they pass in: how worker processes
are run (``request.RunWorkers``), and where sentences for the user go. Nothing here prints.
"""
