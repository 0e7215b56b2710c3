"""Check a capsule network's routing and losses against the papers, and name the mistakes."""
