"""The parts of tools/tune.py: kernels (what there is to choose), bench (times them), fit (models the times), header."""
