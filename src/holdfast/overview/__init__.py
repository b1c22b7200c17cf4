"""All locks on the servers, for whoever runs them: who holds what, since when, and who waits.

`looking.Overview` asks, `views` are what it answers. Nothing is changed, no server is started, and
no server is kept busy for long: keys are found by SCAN, and looked at a page at a time.
"""
