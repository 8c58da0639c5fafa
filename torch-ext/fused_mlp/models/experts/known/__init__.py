"""Classes of mixtures that are identified by a hash of their source, because no other class computes the same."""
