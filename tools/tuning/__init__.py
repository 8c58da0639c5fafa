"""The parts of tools/tune.py: kernels, model (the package's own choice and estimates), bench (times), fit, header;
sm80: the same for its GEMMs, including estimates for GPUs that are not present."""
