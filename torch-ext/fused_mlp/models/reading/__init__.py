"""Reading of Python functions: their syntax trees, and attribute look-ups that run no code."""
