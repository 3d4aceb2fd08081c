"""The command line and the gRPC server."""
