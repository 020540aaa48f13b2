"""Calls, values and exceptions as bytes, and back."""
