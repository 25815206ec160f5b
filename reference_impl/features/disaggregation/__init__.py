"""A prefill worker computes a prompt, a decode worker goes on: pages of keys and values travel between them."""
