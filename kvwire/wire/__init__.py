"""Bytes on the wire: headers, handshake messages, control bodies; no I/O, no clock."""
