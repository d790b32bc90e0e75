"""With models and texts of the papers' names the verdicts are about them, and hashes say which.

The weights are random. The small shapes take seconds; those of the released models, minutes:

    pytest -m slow tests/papers/test_real_models.py
"""

import csv
import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
)

from lipscope.models.embedded import default_text
from lipscope.papers import castin_text
from lipscope.papers.running import reproduce_papers

ONLY = ["C1", "C17", "C25", "C33", "V7"]
SMALL_BERT = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4}
SMALL_GPT2 = {"n_embd": 24, "n_layer": 4}


def word_pieces(words):
    """A tokenizer like that of BERT: pieces of words between [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=special)
    tokenizer.train_from_iterator(words.split("\n\n"), trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": text for name, text in names.items()}
    )


def byte_pairs(words):
    """A tokenizer like that of GPT-2: pairs of bytes, and no special tokens around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(words.split("\n\n"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    place = tmp_path_factory.mktemp("texts")
    prose = default_text()
    (place / "alice.txt").write_text(prose[:40_000])
    with open(place / "ag_news_test.csv", "w", newline="") as file:
        news = prose[40_000:60_000].split("\n\n")
        csv.writer(file).writerows([1 + i % 4, "Title", text] for i, text in enumerate(news))
    return place


@pytest.fixture(scope="module", params=["small", pytest.param("released", marks=pytest.mark.slow)])
def brought(request, tmp_path_factory):
    """A folder with bert-base-uncased and gpt2, in small or in their released shapes."""
    place, small = tmp_path_factory.mktemp("models"), request.param == "small"
    torch.manual_seed(0)
    # The defaults of both configurations are the released models.
    bert = BertConfig(**SMALL_BERT if small else {}, num_attention_heads=12)
    gpt2 = GPT2Config(**SMALL_GPT2 if small else {}, n_head=12)
    if not small:
        sizes = bert.num_hidden_layers, bert.hidden_size, bert.vocab_size
        assert sizes == (12, 768, 30522)
        assert (gpt2.n_layer, gpt2.n_embd, gpt2.vocab_size) == (12, 768, 50257)
    for name, module, tokenizer in (
        ("bert-base-uncased", BertModel(bert), word_pieces),
        ("gpt2", GPT2Model(gpt2), byte_pairs),
    ):
        module.save_pretrained(place / name)
        tokenizer(default_text()[:40_000]).save_pretrained(place / name)
    yield place, small
    shutil.rmtree(place)  # a gigabyte in the released shapes


@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_the_same_command_judges_the_models_that_the_user_brings(
    brought, texts, tmp_path, monkeypatch
):
    folder, small = brought
    if small:
        monkeypatch.setattr(castin_text, "SHORT_LENGTHS", (4, 8, 12))
        monkeypatch.setattr(castin_text, "FEW_WINDOWS", 2)
    outcomes = reproduce_papers(only=ONLY, models=folder, texts=texts, quick=True, out=tmp_path)
    found = {one.claim.id: one for one in outcomes}
    assert {one.word for one in outcomes} <= {"REPRODUCED", "DIFFERS"}, [
        one.error or one.verdict for one in outcomes
    ]
    used = {id: one.record.used for id, one in found.items()}
    assert used["C1"].keys() == {"bert-base-uncased", "alice"}
    assert used["C17"]["gpt2"] == "random weights, seed 0"
    assert used["C17"]["gpt2 tokenizer"] == used["C25"]["gpt2"]
    assert used["C25"].keys() == {"gpt2", "alice"}
    assert used["V7"].keys() == {"bert-base-uncased", "ag_news"}
    for id, name in (("C1", "bert-base-uncased"), ("C25", "gpt2"), ("C33", "gpt2")):
        assert used[id][name].startswith("sha256 ")
    assert used["V7"]["bert-base-uncased"] == used["C1"]["bert-base-uncased"]
    layers = 4 if small else 12
    assert found["C1"].record.numbers["layers"] == [0, layers // 2]
    assert found["V7"].record.numbers["layer"] == layers // 2
    assert "--models DIR --text-dir DIR" in (tmp_path / "reproduce.html").read_text()
    again = reproduce_papers(only=ONLY, models=folder, texts=texts, quick=True, out=tmp_path)
    assert [one.record for one in again] == [one.record for one in outcomes]
    if small:  # other files of a model are another model
        config = folder / "gpt2" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"note": "changed"}))
        (third,) = reproduce_papers(
            only=["C33"], models=folder, texts=texts, quick=True, out=tmp_path
        )
        assert third.record.used["gpt2"] != used["C33"]["gpt2"]
