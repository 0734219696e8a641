"""Move blocks between caches and tiers: put, get, and their common part. Internal."""
