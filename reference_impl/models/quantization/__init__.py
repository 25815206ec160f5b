"""Linear layers whose weights take 4 or 8 bits: one LinearMethod for each way to store and multiply them."""
