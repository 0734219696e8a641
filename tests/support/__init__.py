"""What the tests share: the leak check, both event loops, and the house rules."""
