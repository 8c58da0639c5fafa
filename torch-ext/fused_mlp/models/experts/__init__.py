"""Mixtures of experts: what they compute, proved from source, and their fused forwards."""
