"""The gRPC server of the control plane, who watches it, and who may speak for which worker."""
