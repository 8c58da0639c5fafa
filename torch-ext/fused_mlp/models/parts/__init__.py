"""The parts of an MLP: recognition of activations, norms, linear layers and adapters, and their guards."""
