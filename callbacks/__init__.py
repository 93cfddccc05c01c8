"""Lightning callbacks: what happens around a training step."""
