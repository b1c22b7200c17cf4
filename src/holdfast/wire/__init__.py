"""Connections to servers. redis-py opens and authenticates them; hiredis parses the replies.

Nothing here retries. A request is sent once. If its outcome is unknown, `OutcomeUnknown` is raised.
"""
