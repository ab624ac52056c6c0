"""`crossdock tune`: LL against HT on this machine, and from which step on AUTO is to run HT."""
