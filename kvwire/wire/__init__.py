"""What travels: headers, handshake messages, control bodies. No I/O and no clock."""
