"""The `treadle` command.

Owns what a person types: bringing a fabric up and down on one machine, looking at it, talking to it. Does not serve, map or
compute anything itself: services are processes of their own, called through `treadle.client`.
"""
