"""Stages of the data pipeline, one a file."""
