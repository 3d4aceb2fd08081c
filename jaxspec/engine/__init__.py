"""Requests in, tokens out: scheduling on the host, compiled programs on the mesh."""
