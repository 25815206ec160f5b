"""Steps of one token on a CPU, with what lies between two attentions compiled to one function."""
