"""Mixtures of experts: proofs, from source, of what they compute, and their fused forwards."""
