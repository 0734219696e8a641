"""The KV database: blocks by the hash of their chain, in memory and on disk."""
