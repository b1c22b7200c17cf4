"""What must hold in a simulation run. `promises` lists the checks by their letters."""
