"""The algorithms, each written once, as `async def` over `holdfast.port`.

The core imports no clock, randomness, sockets, threads or event loop. import-linter checks this.
"""
