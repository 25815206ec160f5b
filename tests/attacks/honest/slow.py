# honest: correct and slow: several calls of a second of processor time

# %% last
import time

calculate = apply_all


def apply_all(model, tokens, window):
    end = time.process_time() + 1.0
    while time.process_time() < end:
        pass
    return calculate(model, tokens, window)
