"""The parts of an MLP: which activation, norm, linear layer or adapter something is, and what guards that."""
