"""Clusters on Google Cloud and on a laptop: created, extended, described and removed."""
