"""Predictions beside measurements that others have published: `python -m benchmarks.fidelity`."""
