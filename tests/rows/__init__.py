"""Which combinations of settings the tests train and measure: covering rows, kept in rows.json.

``make rows`` (``python -m tests.rows``) writes the file after a setting, a rule or a factor has changed. Computing the
rows takes seconds; every process of the tests only reads them.
"""
