"""Whether a lab tells right from wrong: stub, reference, variants and mutants, in its public and its private forms."""
