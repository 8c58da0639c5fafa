"""Matches of an MLP, or of its block, in the source of a method."""
