"""Benchmarks of the simulator: ``python -m benchmarks``."""
