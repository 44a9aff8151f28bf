"""Models in torch: one small explicit forward, attention states, Engram fusion, and the files these need.

Import from the part you want (`treadle.nn.model`, `treadle.nn.fusion` …): this package imports nothing by itself,
so that `treadle.nn.model_fetch` and `treadle.nn.token_map` cost no torch import.
"""
