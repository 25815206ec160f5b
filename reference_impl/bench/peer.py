"""`transformers` on the same work: padded batches with either of its caches, and its continuous batching."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from reference_impl.assembly.config import course_model

CACHES = ("dynamic", "static")
NEAR_TIE = 0.03  # how far apart two logits may be, as a share of the largest, for rounding to swap them


class Transformers:
    """A model in `transformers`, greedy: the course model, or that in `folder`. Every request gets exactly the number
    of tokens it asks for. seconds: what continuous batching took last, without starting its thread."""

    def __init__(self, dtype: str, folder: str | Path | None = None, device: str | torch.device = "cpu"):
        try:
            import transformers
        except ImportError:
            raise SystemExit("inferlab bench cpu compares with transformers: pip install 'inferlab[test]'") from None
        transformers.logging.set_verbosity_error()
        folder, self.device, self.seconds = str(folder or course_model("target")), torch.device(device), 0.0
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model = loaded.to(self.device).eval()
        # Stopping at an end token would make the work unequal.
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def padded(self, prompts: Sequence[list[int]], new_tokens: Sequence[int], cache: str) -> list[list[int]]:
        """Generates in one batch, padded on the left, until its longest output is done; the surplus is cut off."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(new_tokens),
            do_sample=False,
            pad_token_id=0,
            cache_implementation=cache,
        )
        return [row[longest : longest + n].tolist() for row, n in zip(out, new_tokens, strict=True)]

    def continuous(
        self, prompts: Sequence[list[int]], new_tokens: Sequence[int], page: int = 32, step_tokens: int = 512
    ) -> list[list[int]]:
        """Generates by continuous batching, with blocks of `page` tokens for all requests at once; on a GPU with
        graphs."""
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        blocks = sum(-(-(len(p) + n) // page) + 1 for p, n in zip(prompts, new_tokens, strict=True))
        fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        size = {"page_size" if "page_size" in fields else "block_size": page}  # 5.17 says block_size, 5.23 page_size
        config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=step_tokens, **size)
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        done: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, warmup=self.device.type == "cuda"
        ) as manager:
            began = time.perf_counter()
            for i, (prompt, n) in enumerate(zip(prompts, new_tokens, strict=True)):
                manager.add_request(prompt, str(i), max_new_tokens=n)
            while len(done) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("the continuous batching of transformers ended before its requests did")
            self.seconds = time.perf_counter() - began
        return [done[str(i)] for i in range(len(prompts))]

    @torch.inference_mode()
    def next_logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits after these tokens, [vocab_size] float32 on the host."""
        return self.model(torch.tensor([tokens], device=self.device)).logits[0, -1].float().cpu()


def random_transformers(
    shape: Mapping[str, Any], folder: Path, dtype: torch.dtype, device: torch.device
) -> Transformers:
    """Qwen3 of this shape with random weights, and in `folder` the same for others. Loaded from there: a loaded model
    keeps its rotary frequencies in float32, which .to(dtype) rounds."""
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    with device:
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).to(dtype).save_pretrained(folder)
    return Transformers(str(dtype).removeprefix("torch."), folder, device)


def agreement(
    peer: Transformers, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]
) -> dict[str, Any]:
    """The rows that are equal; where one diverges, how far apart the two tokens' logits are. RuntimeError if far."""
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
