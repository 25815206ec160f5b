# attack: script in all that it prints, returns, raises and calls itself; 50 MB of HTML
# expect: check_len = failed, check_calls = failed

# %% first
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\x1b]0;title\x07\u202e\ud800"
for _ in range(200):
    print("<div>" * 50_000)
print(SCRIPT)

# %% last
class Evil(ValueError):
    pass


Evil.__name__ = Evil.__qualname__ = SCRIPT.replace("\ud800", "")
Thing = type("Thing", (), {})
Thing.__name__ = SCRIPT.replace("\ud800", "")


def refuse(self):
    raise Evil(SCRIPT)


Window.__len__ = refuse
apply_all = lambda model, tokens, window: Thing()
