"""What every call goes through, and the thread that owns the engine."""
