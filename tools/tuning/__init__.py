"""The parts of tools/tune.py: kernels, model (the package's own choice and estimates), bench (times), fit, header."""
