"""What is wrong with servers, for a lock: facts are gathered, checks read them, a report tells.

`gathering` asks the servers, and only looks: nothing here changes anything. `facts` is what they
answered, as plain data. Each check in `checks` is a function from facts to findings. `report` runs
them all. Printing is the command line's business.
"""
