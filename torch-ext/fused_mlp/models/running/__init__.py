"""What fused methods call."""
