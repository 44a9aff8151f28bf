"""`treadle bench peers`: the rows of Engram layers by what a user would take instead of treadle, and by treadle, in one run.

One file for each peer. What a peer needs it takes from an environment of its own, and what it cannot have it says.
"""
