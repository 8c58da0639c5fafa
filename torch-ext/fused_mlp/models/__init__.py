"""Whole models: recognising their MLPs, fusing them in place, verifying and restoring them."""
