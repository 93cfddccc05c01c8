"""Stages of the data pipeline, one a file: pool, shortcut, audit, diagnose, finalise.

Each is a pure function from a batch of records to what becomes of them; those that judge contents
take the verifiers that they ask. ``runner`` runs a stage over a whole set and keeps its results.
"""
