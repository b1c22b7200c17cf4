"""Connections to a node: redis-py opens them, authenticates and selects; hiredis does the rest.

Nothing here retries: a request is sent once, and what is not known about it is said.
"""
