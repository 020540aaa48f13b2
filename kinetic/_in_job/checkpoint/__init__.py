"""Checkpoints in two tiers: frequent ones in each host's memory, rarer ones in a shared folder."""
