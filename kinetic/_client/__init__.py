"""The caller's side of a call: specify, plan, submit, follow, outcome."""
