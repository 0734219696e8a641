"""Devices by what a library offers, and their memory on its way through the host."""
