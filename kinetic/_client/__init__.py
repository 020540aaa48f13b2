"""The five steps of a call, on the side of the caller."""
