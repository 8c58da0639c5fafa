"""Answers before trust: :func:`check` of a machine, :func:`benchmark` of a model."""
