"""Benchmarks: each prints its set-up, a table with the baseline, and one JSON line last."""
