"""Accelerators: their names, slices, machines and prices. Start at `resolve.resolve`."""
