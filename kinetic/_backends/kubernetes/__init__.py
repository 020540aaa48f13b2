"""Jobs as Jobs and JobSets of a Kubernetes cluster."""
