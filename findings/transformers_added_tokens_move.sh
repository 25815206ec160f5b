#!/usr/bin/env bash
# transformers 5.23.0, tokenizers 0.23.3: a class that rebuilds its tokenizer (LlamaTokenizer(Fast) here) takes added
# tokens from `added_tokens_decoder` of tokenizer_config.json alone. One that only tokenizer.json has is no token any
# more, and those behind it move: a token that both files give the id 265 gets 264, without an error or a warning, so
# texts with it go to another row of the embedding than the model was trained with. With PreTrainedTokenizerFast both
# tokens keep their ids. Seen 2026-11-30 on Python 3.11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PY'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

place = Path(sys.argv[1], "model")
place.mkdir()
vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
for piece in ("▁", "h", "i", "hi", "▁hi"):
    vocabulary[piece] = len(vocabulary)
made = Tokenizer(models.BPE(vocabulary, [("h", "i"), ("▁", "hi")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
made.add_special_tokens(["<unk>", "<s>", "</s>"])
made.add_tokens(["<tool>", "<think>"])
made.save(str(place / "tokenizer.json"))
(place / "config.json").write_text('{"model_type": "llama"}')
assert (made.token_to_id("<tool>"), made.token_to_id("<think>")) == (264, 265)

flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
listed = {"265": {"content": "<think>", **flags}}
found = {}
for name in ("PreTrainedTokenizerFast", "LlamaTokenizerFast"):
    fields = {"tokenizer_class": name, "added_tokens_decoder": listed}
    (place / "tokenizer_config.json").write_text(json.dumps(fields))
    tokenizer = AutoTokenizer.from_pretrained(place)
    found[name] = (tokenizer.convert_tokens_to_ids("<think>"), tokenizer.convert_tokens_to_ids("<tool>"))
    print(f"{name:25} <think> {found[name][0]}, <tool> {found[name][1]}, {len(tokenizer)} tokens")
assert found == {"PreTrainedTokenizerFast": (265, 264), "LlamaTokenizerFast": (264, 0)}, "this has changed"
PY
