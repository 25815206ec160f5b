# honest: warnings and text on stderr
# says: be careful

# %% last
import logging
import sys
import warnings

mean = Window.mean


def loud(self):
    warnings.warn("harmless", stacklevel=2)
    logging.warning("be careful")
    print("on stderr", file=sys.stderr)
    return mean(self)


Window.mean = loud
