"""Slices simulated on this machine."""
