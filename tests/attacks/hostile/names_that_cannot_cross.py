# attack: a graded name that is a module
# expect: check_calls = failed
# says: apply_all is not defined

# %% last
import math as apply_all
