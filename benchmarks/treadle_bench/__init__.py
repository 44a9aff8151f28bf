"""Baselines and figures. May import anything; imported by nobody."""
