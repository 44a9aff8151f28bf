"""How a treadle service starts, reports, limits and stops: settings, logs, server, health, errors, metrics, ready line; keys and tenants;
small files, locks and the folder that is its own.

Knows nothing of tables, models or memories; a service's `__main__.py` puts the two together.
"""
