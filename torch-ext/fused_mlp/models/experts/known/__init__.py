"""Classes of mixtures that are known by the hash of their source, since no other class computes the same."""
