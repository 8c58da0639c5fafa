"""Rewriting of methods so that they contain fused calls."""
