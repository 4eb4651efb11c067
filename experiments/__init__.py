"""Thin programs on top of the library: train, ablate, replay, the benchmarks and the report."""
