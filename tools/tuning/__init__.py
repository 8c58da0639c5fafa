"""The parts of tools/tune.py: kernels, model (the package's own choice and estimates), bench (times), fit, header;
sm80: the same of its GEMMs, on GPUs that are not here too."""
