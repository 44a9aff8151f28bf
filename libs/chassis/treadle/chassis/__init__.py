"""How a treadle service starts, reports, limits and stops: settings, logs, server, health, errors, metrics, ready line.

Knows nothing of tables, models or memories; a service's `__main__.py` puts the two together.
"""
