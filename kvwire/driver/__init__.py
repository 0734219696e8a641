"""What a communicator's parts share, and what drives one core on one link."""
