"""The protocol: frames and time in, frames and events out. Pure and deterministic.

No module here uses a socket, a clock, an event loop or random numbers: times, nonces
and keys are arguments. Payload does not pass through the core. The core decides which
bytes of which buffer belong to a frame, and the links move these bytes.

A method that handles a peer's frame raises a ProtocolError if the frame breaks a rule;
the error contains the rule's number.
"""
