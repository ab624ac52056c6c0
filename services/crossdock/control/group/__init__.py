"""The state of one group and its rules: pure. Members, epochs, blame, cordons, recovery."""
