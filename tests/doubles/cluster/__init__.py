"""A Kubernetes API server for tests, with controllers, a scheduler, and nodes whose pods are
processes of this machine.

The official client connects with a kubeconfig, and gets the responses of a real control plane.

The modules: `fake` (the interface for tests), `server` and `routes` (HTTP), `store` (objects and
their history), `jobs` and `jobsets` (controllers), `collector` (deletion), `scheduler`, `kubelet`
and `shim` (pods as processes), `faults` (failures that a test requests).
"""
