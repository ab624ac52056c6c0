"""Which rank holds which experts, by load; checkpoint switches."""
