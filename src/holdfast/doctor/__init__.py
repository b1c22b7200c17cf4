"""Examination of servers for problems that can break locks.

`collect` queries the servers, and changes nothing. `facts` has their replies as plain data. Each
check in `checks` is a function from facts to findings. `report` runs all checks. The command line
prints the report.
"""
