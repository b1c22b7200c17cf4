"""The port, for threads and for asyncio."""
