"""Declared data: found in calls, sent once, and unpacked once per machine for all its jobs."""
