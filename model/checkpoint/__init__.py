"""From published files to a converted checkpoint, and from there onto a mesh."""
