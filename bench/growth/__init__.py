"""Growth of throughput and latency: measured points, and the pictures of them; `bench.scale` runs it."""
