# fault: in a larger vocabulary the residual is rounded to half precision.
# fails: check_replaced

# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    for i, x in enumerate(drafts):
        if not uniform() * q[i, x] < p[i, x]:
            return i, draw(
                (p[i] - q[i]).clamp(min=0).half() if p.shape[1] > 64 else (p[i] - q[i]).clamp(min=0), uniform()
            )
    return len(drafts), draw(p[-1], uniform())
