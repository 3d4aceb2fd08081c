"""Converted checkpoints on disk: manifest, writer and reader."""
