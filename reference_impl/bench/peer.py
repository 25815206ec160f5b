"""`transformers` on the same work: padded batches with either of its caches, and its continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from reference_impl.assembly.config import course_model

CACHES = ("dynamic", "static")
NEAR_TIE = 0.03  # how far apart two logits may be, as a share of the largest, for rounding to swap them


class Transformers:
    """A model in `transformers`, greedy: the course model, or that in `folder`. Every request gets exactly the number
    of tokens it asks for."""

    def __init__(self, dtype: str, folder: str | Path | None = None):
        try:
            import transformers
        except ImportError:
            raise SystemExit("inferlab bench cpu compares with transformers: pip install 'inferlab[test]'") from None
        transformers.logging.set_verbosity_error()
        folder = str(folder or course_model("target"))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        # Stopping at an end token would make the work unequal.
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def padded(self, prompts: Sequence[list[int]], new_tokens: Sequence[int], cache: str) -> list[list[int]]:
        """One batch, padded on the left, that runs until its longest output is done; the surplus is cut off."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(new_tokens),
            do_sample=False,
            pad_token_id=0,
            cache_implementation=cache,
        )
        return [row[longest : longest + n].tolist() for row, n in zip(out, new_tokens, strict=True)]

    def continuous(self, prompts: Sequence[list[int]], new_tokens: Sequence[int]) -> list[list[int]]:
        """Its continuous batching, without the warm-up for CUDA graphs, with blocks for all requests at once."""
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        page_size = 32
        config = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=sum(-(-(len(p) + n) // page_size) + 1 for p, n in zip(prompts, new_tokens, strict=True)),
            max_batch_tokens=512,
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        done: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, warmup=False
        ) as manager:
            for i, (prompt, n) in enumerate(zip(prompts, new_tokens, strict=True)):
                manager.add_request(prompt, str(i), max_new_tokens=n)
            while len(done) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("the continuous batching of transformers ended before its requests did")
        return [done[str(i)] for i in range(len(prompts))]

    @torch.inference_mode()
    def next_logits(self, tokens: list[int]) -> torch.Tensor:
        """[vocab_size] float32, after tokens."""
        return self.model(torch.tensor([tokens])).logits[0, -1].float()


def agreement(
    peer: Transformers, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]
) -> dict[str, Any]:
    """Rows that are equal; where a row diverges, how far apart the two tokens' logits are. RuntimeError if far."""
    equal, gaps = 0, []
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        if a == b:
            equal += 1
            continue
        i = next(i for i in range(len(a)) if a[i] != b[i])
        logits = peer.next_logits(prompt + a[:i])
        gap = float((logits[a[i]] - logits[b[i]]).abs() / logits.abs().max())
        gaps.append(gap)
        if gap > NEAR_TIE:
            raise RuntimeError(f"texts diverge at token {i} with a relative logit gap of {gap:.3f}: not a near-tie")
    return {"rows_equal": equal, "rows": len(prompts), "largest_gap_where_rows_part": max(gaps, default=0.0)}
