#!/bin/bash
# transformers 5.19.0: one call with truncation=True is written by save_pretrained into tokenizer.json, for all other readers.
#
# truncation and padding are arguments of a call, so the tokenizer is expected to be the same after it. The call sets them in
# the tokenizer itself, and save_pretrained writes that. transformers sets them anew in each call and shows nothing; what
# reads tokenizer.json by itself (tokenizers, and servers built on it) cuts all texts at that length. Seen: of 8 words the
# saved file gives 3 tokens, and one word is padded to 3. Way round: backend_tokenizer.no_truncation() and no_padding()
# before save_pretrained, or one more call without these arguments.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.19.0 tokenizers==0.23.3
cat >"$folder/program.py" <<'P'
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

words = "a b c d e f g h".split()
raw = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["<pad>", *words])}, unk_token="<pad>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", unk_token="<pad>")

def lengths(folder):
    tokenizer.save_pretrained(folder)
    read, again = Tokenizer.from_file(f"{folder}/tokenizer.json"), AutoTokenizer.from_pretrained(folder)
    texts = ("a", " ".join(words))
    return [len(read.encode(text).ids) for text in texts], [len(again(text)["input_ids"]) for text in texts]

seen = [lengths("before")]
tokenizer("a b c d e", truncation=True, max_length=3, padding="max_length")
seen.append(lengths("after"))
tokenizer("a b c d e")
seen.append(lengths("reset"))
for when, (read, again) in zip(("before", "after such a call", "after one more call without"), seen):
    print(f"transformers 5.19.0, saved {when}: tokens of 1 and 8 words {read} by tokenizers, {again} by transformers")
sys.exit(seen != [([1, 8], [1, 8]), ([3, 3], [1, 8]), ([1, 8], [1, 8])])
P
cd "$folder"
HF_HOME="$folder/hf" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore program.py 2>errors || { cat errors; exit 1; }
