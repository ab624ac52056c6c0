"""What goes over the network: the generated messages (v1), and tensors in them (wire)."""
