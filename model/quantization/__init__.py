"""How weights of few bits are laid out, and which layouts are known."""
