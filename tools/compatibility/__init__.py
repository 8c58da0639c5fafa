"""Builds for other machines and versions, and what runs there (smoke, models: under each version of torch)."""
