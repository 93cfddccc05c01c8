"""What a configuration takes: memory of each rank, and the least time of a step."""
