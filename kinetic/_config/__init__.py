"""Settings of the caller's machine: environment, profiles, and the origin of each value."""
