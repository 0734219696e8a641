"""What travels: headers, handshake messages and control bodies. Pure, no I/O, no clock."""
