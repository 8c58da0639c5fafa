"""Fused methods: generating them from source, installing and removing them, and tracing them in torch.compile."""
