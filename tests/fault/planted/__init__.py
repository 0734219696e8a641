"""Bugs planted on purpose, to show that the tests would find them (goal Q6)."""
