"""Verifiers: who the stages of the data pipeline ask, and how."""
