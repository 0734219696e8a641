"""The bytes on the wire: headers, handshake messages, control bodies."""
