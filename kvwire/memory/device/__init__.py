"""Devices whose memory host code cannot touch: streams, events, copies."""
