"""Frozen quantised weights: of single layers, and stacks of expert weights."""
