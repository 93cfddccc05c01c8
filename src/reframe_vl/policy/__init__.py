"""The policy: loading, adapters, scoring of tokens, and teachers."""
