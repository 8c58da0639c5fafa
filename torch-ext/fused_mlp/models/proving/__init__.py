"""Proofs of what code computes, from its source, by an interpreter that runs none of it."""
