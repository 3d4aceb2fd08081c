"""A request's way: read, checked, admitted, and answered in pieces."""
