"""Fused methods themselves: made of source, put into modules and taken out, and traced by torch.compile."""
