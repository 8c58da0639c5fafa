"""The programs that tools/compat.py runs under each version of torch."""
