"""Jobs on a Ray cluster, through its dashboard."""
