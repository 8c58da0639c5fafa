"""What code computes, proved from its source by an interpreter that runs none of it."""
