"""One file a family, their configs, and the registry of them."""
