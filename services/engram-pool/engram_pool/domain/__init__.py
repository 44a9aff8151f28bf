"""What the pool knows: versions and their standing, loading, gathering. No sockets, no files, no protos."""
