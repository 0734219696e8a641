"""What the rows of uses.md are done to and by."""
