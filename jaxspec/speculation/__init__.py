"""The round: draft, grow, verify, accept, commit; and what it is made of."""
