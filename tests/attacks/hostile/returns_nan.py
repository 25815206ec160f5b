# attack: NaN
# expect: check_window = failed

# %% last
mean = Window.mean
Window.mean = lambda self: mean(self) * float("nan")
