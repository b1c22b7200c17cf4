"""Automatic mutation testing: small changes of `core/` and the scripts that a check must catch.

`make mutation` draws a sample of all mutants. For each mutant it takes those of 3,000 simulation
runs that reach its line, then tests that reach it, and lists the survivors.

    mutants           the `Mutant` class; all mutants of the tree; the sample
    python_operators  mutation operators for Python
    lua_operators     mutation operators for Lua
    reach             which simulation runs and which tests reach a line
    simulate          the process that runs the simulator, with a mutant or to record lines
    trial             one mutant against the simulator and the tests
    accepted          mutants that may survive, each with the reason
"""
