"""DeepSpeed's ZeRO-3 with our all-gathers."""
