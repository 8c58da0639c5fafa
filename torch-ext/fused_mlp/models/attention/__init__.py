"""Attentions: what stands in front of their products of queries and keys."""
