"""Targets and drafters: layers, families, quantisation, checkpoints and text."""
