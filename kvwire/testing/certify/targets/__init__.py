"""Adapters of transports that come with kvwire; each imports its library by itself."""
