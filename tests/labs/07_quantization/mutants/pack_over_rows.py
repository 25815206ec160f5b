# fault: an odd row's last byte holds the first code of the next row.
# fails: check_pack

# %% nbgrader={"grade_id": "pack_int4"}
def pack_int4(codes):
    """Two codes in a byte: [out, in] int8, -7 to 7 -> [out, ceil(in / 2)] uint8."""
    flat = torch.nn.functional.pad((codes.to(torch.int16) + 8).flatten(), (0, 2 * codes.numel()), value=8)
    num_bytes = len(codes) * ((codes.shape[1] + 1) // 2)
    return (flat[::2] | flat[1::2] << 4)[:num_bytes].view(len(codes), -1).to(torch.uint8)
