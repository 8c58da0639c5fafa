"""Functions that fused methods call at run time."""
