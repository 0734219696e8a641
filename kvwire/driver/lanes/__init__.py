"""Carry payload on other transports than the control link. Internal."""
