"""Measurements that choose a constant; `kvwire bench` measures the whole."""
