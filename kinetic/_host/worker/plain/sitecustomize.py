"""An empty stand-in for the user's sitecustomize."""
