"""A person in the place of the policy, in the terminal (docs/viewer.md)."""
