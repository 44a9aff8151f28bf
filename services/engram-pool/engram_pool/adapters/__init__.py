"""The outside of the pool: the folder of segments, checkpoints on disk, Prometheus."""
