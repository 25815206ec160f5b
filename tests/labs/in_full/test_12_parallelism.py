from tests.labs.in_full.proofs import *  # noqa: F403 (the tests of every lab, of this one)
