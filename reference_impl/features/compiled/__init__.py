"""Steps of one token on a CPU, where all operators between two attentions are compiled to one function."""
