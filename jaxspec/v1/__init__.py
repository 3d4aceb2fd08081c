"""The protos of the gRPC API and their generated code."""
