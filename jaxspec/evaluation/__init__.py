"""Acceptance and speed over prompt files."""
