"""The tools that a policy may call, and how each model family writes and reads such calls."""
