"""How rows of clients come in and answers go out: frames, gRPC; what each client may use."""
