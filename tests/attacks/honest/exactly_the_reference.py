# honest: the reference
