"""What the scoring rules of benchmarks are made of; pure functions."""
