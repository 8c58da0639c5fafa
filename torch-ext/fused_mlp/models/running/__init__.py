"""Functions that fused methods call."""
