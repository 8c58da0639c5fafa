"""What autograd sees of a call: an op forward, an op backward, and what is kept between them."""
