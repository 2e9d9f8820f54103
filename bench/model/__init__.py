"""A model of throughput, lag and the first bottleneck, from measured costs: `python -m bench.model`."""
