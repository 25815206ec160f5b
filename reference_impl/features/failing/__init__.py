"""Ends a request whose logits are not finite with an error that says where that began; the others go on."""
