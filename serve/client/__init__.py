"""Our own clients of the server."""
