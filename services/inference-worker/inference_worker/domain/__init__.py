"""What the worker knows: requests, scheduling, sampling, text, prefix reuse and Engram memory. No gRPC, no files."""
