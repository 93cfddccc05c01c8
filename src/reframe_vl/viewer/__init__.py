"""Rollouts to look at: one HTML file that needs no network (docs/viewer.md)."""
