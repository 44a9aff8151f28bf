"""Grows an Engram for a model that has none: rows and projections learnt from text, the model itself frozen.

Needs the extra `treadle-engram-pool[grower]` (torch, treadle-nn). What it writes, a pool loads: see `folder`.
"""
