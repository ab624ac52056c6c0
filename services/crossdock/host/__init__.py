"""The processes or containers of one host: started, kept running, drained together."""
