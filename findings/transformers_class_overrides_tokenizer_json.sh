#!/usr/bin/env bash
# transformers 5.23.0, tokenizers 0.23.3: where tokenizer_config.json names LlamaTokenizer(Fast), AutoTokenizer takes
# vocabulary, merges and post-processor from tokenizer.json, but not how text is cut: the class has a pre-tokenizer of
# its own, by the fields `legacy` and `add_prefix_space`. A folder of Llama 2's kind (a space before every piece of text,
# by a Prepend in tokenizer.json) so has other ids behind a special token than `tokenizers` gives for the same file;
# with "legacy": true, or with the class PreTrainedTokenizerFast, the same. `add_bos_token` and `add_eos_token` change
# nothing beside a tokenizer.json. Seen 2026-11-30 on Python 3.11, without an error or a warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PY'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer

place = Path(sys.argv[1], "model")
place.mkdir()
vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
for piece in ("▁", "h", "i", "hi", "▁hi"):
    vocabulary[piece] = len(vocabulary)
made = Tokenizer(models.BPE(vocabulary, [("h", "i"), ("▁", "hi")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
made.decoder = decoders.Sequence(spaces)
made.add_special_tokens(["<unk>", "<s>", "</s>"])
made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
made.save(str(place / "tokenizer.json"))
(place / "config.json").write_text('{"model_type": "llama"}')

TEXT = "hi</s>hi"
as_stored = made.encode(TEXT).tokens
print(f"{'tokenizers':75}", as_stored)
assert as_stored == ["<s>", "▁hi", "</s>", "▁hi"]
for name, fields, expected in (
    ("LlamaTokenizerFast", {}, ["<s>", "▁hi", "</s>", "hi"]),
    ("LlamaTokenizerFast", {"legacy": False}, ["<s>", "▁hi", "</s>", "hi"]),
    ("LlamaTokenizerFast", {"legacy": True}, as_stored),
    ("LlamaTokenizerFast", {"add_prefix_space": False}, ["<s>", "hi", "</s>", "hi"]),
    ("LlamaTokenizerFast", {"add_bos_token": False, "add_eos_token": True}, ["<s>", "▁hi", "</s>", "hi"]),
    ("PreTrainedTokenizerFast", {"legacy": False, "add_prefix_space": False}, as_stored),
):
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **fields}))
    tokenizer = AutoTokenizer.from_pretrained(place)
    found = tokenizer.convert_ids_to_tokens(tokenizer(TEXT).input_ids)
    print(f"{name:25}{json.dumps(fields):50}", found)
    assert found == expected, "this has changed"
PY
