"""The algorithms, each written once, as `async def` over the port.

Pure: no clock, no randomness, no sockets, no threads, no event loop; import-linter sees to it.
"""
