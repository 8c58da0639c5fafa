"""Builds for other machines and versions, and tests of them (smoke, models: under each version of torch)."""
