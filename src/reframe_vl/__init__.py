"""Post-training for visual agents: models that call tools and look at what they return."""
