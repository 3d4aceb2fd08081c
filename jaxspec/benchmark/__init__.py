"""What a step and a round cost on this machine, against the bytes that they move."""
