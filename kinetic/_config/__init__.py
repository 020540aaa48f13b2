"""What the caller's machine is set to, and where each value came from."""
