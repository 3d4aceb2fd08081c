"""What models are made of: attention, experts, norms, the paged cache."""
