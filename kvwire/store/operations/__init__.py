"""Move blocks between caches and tiers: put, get, and what they share. Internal."""
