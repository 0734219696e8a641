"""Put and get: moving blocks between caches and tiers. Internal."""
