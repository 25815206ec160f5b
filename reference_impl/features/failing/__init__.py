"""A request whose logits are not numbers ends with an error that says where they began; the others go on."""
