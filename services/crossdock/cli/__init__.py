"""The command `crossdock`: what people run, and how it is shown."""
