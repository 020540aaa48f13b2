"""From the name of an accelerator to the shape of the slice behind it:
`resolve.resolve(name) -> topology.Topology`."""
