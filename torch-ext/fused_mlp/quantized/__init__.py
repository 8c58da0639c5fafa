"""Frozen quantised weights: of a layer, and stacks of those of experts."""
