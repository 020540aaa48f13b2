"""The caller's side of a call, in five steps: specify, plan, submit, follow, outcome."""
