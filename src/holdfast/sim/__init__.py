"""The simulator: runs the shipped lock code with injected faults, deterministic for each seed."""
