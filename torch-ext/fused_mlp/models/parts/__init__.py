"""The parts of an MLP: which activation, norm or linear layer something is, and where an MLP is in code."""
