"""The house rules as functions: each takes the text of the tree and yields its breaches.

`tests/test_tidy.py` applies them to the project and, one planted breach each, to themselves.
"""
