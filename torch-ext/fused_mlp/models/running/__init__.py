"""The functions that fused methods call, and how the methods get into modules."""
