"""An operator's view of all locks on the servers: holders, ages, and waiters.

`scan.Overview` reads the servers, and `views` are its results. It changes nothing and starts no
server. No server is blocked for long: keys are found with SCAN, and read one page at a time.
"""
