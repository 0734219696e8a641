"""What the rows of docs/reference/wrong-uses.md are done to and by."""
