"""Benchmarks of nnxlib beside its peers: one script, one table each, as ratios measured in one run. See README.md."""
