"""Conversion of calls, values and exceptions to bytes, and back."""
