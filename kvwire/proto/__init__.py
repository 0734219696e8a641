"""The protocol: frames and time in, frames and events out. Pure and deterministic.

No module here uses a socket, a clock, an event loop or random numbers: times, nonces
and keys are arguments. Payload does not pass through the core: it decides which bytes
of which buffer belong to a frame, and the links move them.

A method that handles a frame of the peer raises a ProtocolError if the frame breaks a
rule; the raise names the rule's number.
"""
