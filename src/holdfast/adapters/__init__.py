"""Implementations of `holdfast.port` for threads and for asyncio."""
