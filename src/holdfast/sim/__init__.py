"""The simulator: the shipped lock code in a world where everything goes wrong, on any seed."""
