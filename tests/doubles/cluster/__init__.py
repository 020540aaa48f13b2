"""A Kubernetes API server for tests, with its controllers, its scheduler and nodes whose pods are
processes of this machine.

In: requests of the official client, over a kubeconfig. Out: what a real control plane answers.
Used by: tests of the Kubernetes backend and of the command line. Nothing in `kinetic` knows it.

The parts, each in a module of its own: `fake` (the cluster as tests hold it), `server` and `routes`
(HTTP), `store` (objects and their history), `jobs` and `jobsets` (controllers), `collector`
(deletion), `scheduler`, `kubelet` and `shim` (pods as processes), `faults` (what goes wrong).
"""
