"""Autograd nodes of calls: an op forward, an op backward, and the values kept between them."""
