# fault: a part of a larger matrix is read as if it were contiguous.
# fails: check_pack

# %% nbgrader={"grade_id": "pack_int4"}
def pack_int4(codes):
    out, num = codes.shape
    if num % 2:
        codes, num = torch.nn.functional.pad(codes, (0, 1)), num + 1
    low, high = (torch.as_strided(codes, (out, num // 2), (num, 2), codes.storage_offset() + i) for i in (0, 1))
    return ((low + 8) | ((high + 8) << 4)).to(torch.uint8)
