"""gRPC between the coordinator, agents and users: server, clients, messages."""
