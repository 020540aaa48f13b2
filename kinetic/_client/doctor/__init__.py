"""Whether this machine can run jobs, what they left behind, and what to do about it."""
