"""The demo model's tokenizer: byte-level BPE, learnt from training text only.

    python examples/model/tokenizer.py --out DIR

Names, towns and numbers of three digits and more fall into several pieces that
many of them share, so that they must be copied piece by piece from the context.
The first two digits of a number are one piece: with single digits the model
learnt to copy words long before numbers, since ten tokens that occur everywhere
are poor landmarks.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

from corpus import MAX_SIZE, documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS = "<|begin|>"
EOS = "<|end|>"
BOS_ID = 0
EOS_ID = 1
MAX_POSITIONS = 1024

CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{% if message.role == 'system' %}
{{ message.content }}
{% elif message.role == 'user' %}
Oscar: {{ message.content }}
{% elif message.role == 'assistant' %}
Noah: {{ message.content }}
{% else %}
{{ raise_exception("roles are system, user and assistant") }}
{% endif %}
{% endfor %}{% if add_generation_prompt %}Noah:{% endif %}
"""
"""The corpus's conversations have names in the place of roles."""


def train_tokenizer(vocab_size: int, num_documents: int, seed: int) -> Tokenizer:
    """Learn the merges. The special tokens get the ids 0 and 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (page.text for page in documents("train", seed, num_documents, MAX_SIZE))
    numbers = (f" {number}" for number in range(10, 100) for _ in range(num_documents // 10))
    tokenizer.train_from_iterator(itertools.chain(texts, numbers), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write ``tokenizer.json``, and the ``tokenizer_config.json`` and chat template that
    transformers wants beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model's tokenizer.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=1536)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1_000)
    options = parser.parse_args()
    tokenizer = train_tokenizer(options.vocab_size, options.documents, options.seed)
    save(tokenizer, options.out)
    print(f"{tokenizer.get_vocab_size()} tokens written to {options.out}")


if __name__ == "__main__":
    main()
