"""What outside things the store uses: folders, Redis, Prometheus."""
