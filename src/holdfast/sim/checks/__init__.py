"""The checks of a simulation run. `promises` lists them by name."""
