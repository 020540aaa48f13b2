"""gRPC between agents, the coordinator and people: server, client, and the messages as bytes."""
