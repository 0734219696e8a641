"""Authentication of peers, by pre-shared keys and certificates. Internal."""
