"""Declared data: found in calls, sent once, unpacked once for all jobs of a machine."""
