"""Gives a feature head a draft vocabulary: the tokens that are most frequent in the course target's training text.

    python datasets/course_model/draft_vocabulary.py eagle /tmp/eagle-1024 --tokens 1024

Copies the head's folder, and writes the tokens into the copy's config.json, the most frequent first, as `draft_tokens`
(assembly/draft_folder.py). A minute, and no training: lm_head is the target's, of which fewer rows are computed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import corpus  # noqa: E402


def frequent(num_tokens: int) -> tuple[list[int], float]:
    """So many tokens, the most frequent first; which share of the training text they are."""
    tokenizer = Tokenizer.from_file(str(HERE / "target" / "tokenizer.json"))
    documents, _ = corpus.split()
    counts = Counter(token for found in tokenizer.encode_batch([text for _, text in documents]) for token in found.ids)
    best = sorted(counts, key=lambda token: (-counts[token], token))[:num_tokens]
    return best, sum(counts[token] for token in best) / counts.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="folder of a feature head; a name is one beside this file")
    parser.add_argument("folder", type=Path, help="where the copy goes")
    parser.add_argument("--tokens", type=int, default=1024)
    given = parser.parse_args()
    head = HERE / given.head  # a path that is absolute stays what it is
    tokens, share = frequent(given.tokens)
    shutil.copytree(head, given.folder)
    config = json.loads((given.folder / "config.json").read_text())
    (given.folder / "config.json").write_text(json.dumps(config | {"draft_tokens": tokens}, indent=2) + "\n")
    print(f"{given.folder}: {len(tokens)} tokens, {share:.1%} of the training text")


if __name__ == "__main__":
    main()
