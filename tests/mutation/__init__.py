"""Automatic mutation: small changes of `core/` and the scripts, each of which a check must notice.

`make mutation` draws a sample of all mutants. It tries each with those of 3,000 simulation runs
that reach its line, then with tests that reach it, and lists the survivors.

    mutants           what a mutant is; every mutant of the tree; the sample
    python_operators  how Python is changed
    lua_operators     how a script is changed
    reach             which simulation runs and which tests reach a line
    simulate          the process that runs the simulator, with a mutant or to record lines
    trial             one mutant against the simulator and the tests
    accepted          mutants that need not be killed, with the reason
"""
