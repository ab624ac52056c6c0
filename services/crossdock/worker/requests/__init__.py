"""How rows of clients come in and answers go out: gRPC, request buffers, connections; what each client may use."""
