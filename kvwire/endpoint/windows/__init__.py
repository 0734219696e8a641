"""Windows: blocks that peers read without asking, until their owner withdraws them."""
