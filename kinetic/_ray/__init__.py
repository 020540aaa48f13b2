"""The door to a Ray cluster's dashboard, for whoever has no Ray: over HTTP."""
