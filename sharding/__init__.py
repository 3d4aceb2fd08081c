"""The mesh, the table of axis rules, and the collectives of a forward pass."""
