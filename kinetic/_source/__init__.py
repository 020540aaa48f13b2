"""The source tree: what of it travels, and how it gets to a store and out of it."""
