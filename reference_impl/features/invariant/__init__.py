"""Logits whose bits do not depend on the batch: each token is computed by itself."""
