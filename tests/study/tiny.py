"""A tiny encoder in a folder, with a tokenizer, as transformers saves one."""

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = [a + b for a in string.ascii_lowercase for b in "aeiou"]
PROSE = " ".join(WORDS[(7 * i * i + 3 * i) % len(WORDS)] for i in range(300))
"""300 tokens that do not repeat in step."""


def save_tiny(folder: Path, layers: int) -> str:
    """An encoder of two heads a layer, d = 8, 48 positions; the vocabulary is two-letter words."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=48,
        initializer_range=0.7,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
