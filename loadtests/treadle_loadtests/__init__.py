"""Scenarios over running services: real processes, load, faults, and somebody who checks every row."""
