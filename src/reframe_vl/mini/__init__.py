"""The embedded default: generated worlds, a small model and its base checkpoints."""
