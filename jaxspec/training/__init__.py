"""Training a DFlash drafter on answers that the target itself writes."""
