"""Converted checkpoints on disk: manifest, parts, writer and reader."""
