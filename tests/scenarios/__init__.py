"""Races and faults of KV transfers, by their ids in docs/topics/reliability.md."""
