"""Say who may connect: pre-shared keys and certificates. Internal."""
