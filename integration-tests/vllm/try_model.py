"""Makes a tiny Llama of random weights with a tokenizer of bytes, to try two servers by hand: `try_model.py FOLDER`."""

import json
import sys
from pathlib import Path

from harness.model import Shape, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<unk>", "<s>", "</s>"]


def main(folder: Path) -> None:
    """Text goes in and comes out; it makes no sense, and depends on every byte of the prompt."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(SPECIAL + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    sizes = {"layers": 4, "hidden": 256, "intermediate": 512, "heads": 8, "kv_heads": 4, "head_dim": 32}
    write(Shape("try", **sizes, spread=0.2, vocabulary=len(vocabulary)), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names))
    print(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
