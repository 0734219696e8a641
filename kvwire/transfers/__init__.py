"""KV transfers: offer, match, send, receive, settle. Internal."""
