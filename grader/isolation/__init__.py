"""The wall around learners' code: bubblewrap, control groups, the warm process, and the doctor that attacks it."""
