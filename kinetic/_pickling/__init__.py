"""The call, its value and its exception as bytes, and back."""
