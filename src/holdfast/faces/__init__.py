"""What people use: `Client` and `AsyncClient`, hand-written twins over the one core."""
