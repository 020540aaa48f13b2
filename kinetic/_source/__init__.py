"""The source tree: what is sent of it, and how it gets into a store and out again."""
