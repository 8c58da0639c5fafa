"""Calls as autograd sees them: an op forward, an op backward, and what is kept between them."""
