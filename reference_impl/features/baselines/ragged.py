"""A Batch without an engine: rows of tokens that start somewhere, one block of max_len slots per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference_impl.interfaces import Batch, GroupTables


def ragged_batch(
    rows: Sequence[tuple[Sequence[int], int]],
    max_len: int,
    device: torch.device,
    layer_windows: Sequence[int | None] = (None,) * 256,
) -> Batch:
    """The batch of these rows. rows: (new tokens, how many came before them). Every row's last token gets logits.

    layer_windows: the window of each layer; by default all of up to 256 layers see everything.
    """
    lens = [len(tokens) for tokens, _ in rows]
    ends = torch.tensor(lens, device=device).cumsum(0)
    positions = [torch.arange(past, past + len(tokens), device=device) for tokens, past in rows]
    slot_mapping = torch.cat([row * max_len + p for row, p in enumerate(positions)])
    block_table = torch.arange(len(rows), dtype=torch.int32, device=device)[:, None]
    windows = list(dict.fromkeys(layer_windows))
    context = [past + len(tokens) for tokens, past in rows]
    return Batch(
        input_ids=torch.tensor([t for tokens, _ in rows for t in tokens], device=device),
        positions=torch.cat(positions),
        query_start_loc=torch.cat((ends.new_zeros(1), ends)).int(),
        seq_lens=torch.tensor(context, dtype=torch.int32, device=device),
        logits_indices=ends - 1,
        request_ids=tuple(str(row) for row in range(len(rows))),
        query_lens=tuple(lens),
        context_lens=tuple(context),
        num_decode_rows=0,
        block_size=max_len,
        groups=tuple(GroupTables(window, slot_mapping, block_table) for window in windows),
        group_of_layer=tuple(windows.index(window) for window in layer_windows),
    )
