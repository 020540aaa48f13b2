"""The gang as a pure state machine: who has joined, who is alive, who failed first."""
