"""Methods made anew, with fused calls in them."""
