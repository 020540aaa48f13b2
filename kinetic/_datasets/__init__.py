"""Declared data: collected from calls, sent once, and unpacked once for all jobs of a machine."""
