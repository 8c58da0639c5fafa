"""Diagnostics: :func:`check` reports on a machine, :func:`benchmark` on a model."""
