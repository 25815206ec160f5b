"""Shows the input of each linear layer to an observer while the engine runs."""
