"""The protocol: frames and time in, frames and events out. Pure and deterministic.

Nothing here knows a socket, a clock, a loop or a random source: times, nonces and keys
are arguments. Payload never passes through: the core says which bytes of which buffer
belong to a frame, and the links move them.

Whatever acts on a frame of the peer raises a ProtocolError where the frame breaks a
rule; number and words of the rule stand at the raise.
"""
