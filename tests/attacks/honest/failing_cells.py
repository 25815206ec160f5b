# honest: added cells that fail, are no Python, or want what is not there

# %% first
import matplotlib.pyplot as plt


raise RuntimeError("an experiment")

# %% last
display(Window(3))
1 / 0
