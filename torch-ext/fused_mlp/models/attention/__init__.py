"""Attentions: the operations before their products of queries and keys."""
