"""The outside things of the worker, one file each: the model folder, the Engram pool, Prometheus."""
