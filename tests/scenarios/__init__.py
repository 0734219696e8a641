"""Races and faults of KV transfers, named after the ids of docs/topics/reliability.md."""
