"""Builds for other machines and versions, and the checks that run there (smoke, models: under each torch version)."""
