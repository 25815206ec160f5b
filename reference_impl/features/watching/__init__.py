"""What goes into each linear layer, shown to an observer while the engine runs."""
