# attack: start-up files, a written virtual environment, replaced modules; it works all the same
# expect: passed
# says: planted []

# %% first
import os
import site
import sys

planted, text = [], "open('/tmp/@MARK@-started', 'w').close()\n"
places = [os.path.dirname(torch.__file__) if "torch" in globals() else "/learner/site/torch", *sys.path, sys.prefix]
places += ["/learner/site", "/learner/side", "/learner/side/learner_side", "/usr/lib", "/etc", "/usr/bin", "/dev", "/"]
places += [site.getusersitepackages() if not site.getusersitepackages().startswith("/tmp") else "/", "@HOME@/.ipython"]
for place in places:
    for name in ("sitecustomize.py", "usercustomize.py", "x.pth", "learner.py", "__init__.py"):
        try:
            with open(os.path.join(place, name), "a") as file:
                file.write(text)
            planted.append(os.path.join(place, name))
        except OSError:
            pass
print("planted", planted)
