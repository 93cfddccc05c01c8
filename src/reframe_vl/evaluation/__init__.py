"""Protocols, metrics and benchmarks that measure a checkpoint."""
