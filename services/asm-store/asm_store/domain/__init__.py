"""What the store knows: versions, pointers, pins, quotas, eviction, lookups, extending. No gRPC, no files, no torch."""
