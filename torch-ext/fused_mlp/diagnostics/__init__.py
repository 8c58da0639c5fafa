"""What users ask before they trust a kernel: :func:`check` of their machine, :func:`benchmark` of their model."""
