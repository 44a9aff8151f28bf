"""Figures of attention-state memory: what a lookup takes, what a prefix costs end to end, how near a dictionary comes to its prefix."""
