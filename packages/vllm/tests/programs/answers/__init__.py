"""Answers through the proxy and of one engine alone, compared byte by byte."""
