"""The public API: `Client` for threads and `AsyncClient` for asyncio, over one core."""
