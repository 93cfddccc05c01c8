"""Consolidating and merging of checkpoints."""
