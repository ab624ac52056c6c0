"""From latency reports to a verdict: which rank, host, link or expert the group waits for; post-mortems."""
