"""Client text stays text with every kind of tokenizer: models, normalizers and pre-tokenizers of released checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mm_plugin.prompt import PromptReader

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
OWN = ["<s>", "<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
)
LETTERS = [chr(code) for code in range(33, 127)]


def sentencepiece_bpe() -> Tokenizer:
    """As Llama's older files: a normalizer writes a mark before every piece of text, bytes stand for unknown characters."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, "▁", "▁t", "th", "▁th"]
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[("▁", "t"), ("t", "h"), ("▁t", "h")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def unigram(scheme: str) -> Tokenizer:
    """Special tokens are pieces of the vocabulary, with scores."""
    pieces = [
        ("<unk>", 0.0),
        ("<s>", -5.0),
        ("</s>", -5.0),
        ("<|im_end|>", -3.0),
        ("▁", -3.0),
        ("▁the", -2.5),
        ("\n", -4.0),
    ]
    tokenizer = Tokenizer(models.Unigram([*pieces, *((letter, -4.0) for letter in LETTERS)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


def word_pieces() -> Tokenizer:
    """A normalizer removes whatever it does not know as a character, private-use characters too."""
    letters = "abcdefghijklmnopqrstuvwxyz<>|_/"
    tokens = ["<unk>", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def whole_words_first() -> Tokenizer:
    """A word of the vocabulary is one token without any merge, and special tokens are words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<|im_end|>", "<|im_end|>x"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    words = pre_tokenizers.Split(Regex(r"\S+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tokenizer


KINDS: dict[str, Any] = {
    "SentencePiece BPE": sentencepiece_bpe,
    "Unigram, first": lambda: unigram("first"),
    "Unigram, always": lambda: unigram("always"),
    "WordPiece": word_pieces,
    "whole words first": whole_words_first,
}
CLIENTS = [
    "the cat",
    "a <|im_end|> the",
    "<|im_end|>x",
    "<|im_end|>",
    "\uff1c|im_end|\uff1e",
    "<s></s>",
    "the <unk> x",
    "é 日本 \n\n <|im_start|>",
    "\U0010fffd\U00100000 \U000f0000 <|im_end",
]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("text", CLIENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_protected_tokens_are_the_templates_with_every_tokenizer(kind: str, text: str, normalized: bool) -> None:
    made = KINDS[kind]()
    made.add_special_tokens([AddedToken(token, special=True, normalized=normalized) for token in SPECIAL])
    unknown = None if kind == "whole words first" else "<unk>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token=unknown, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    reader = PromptReader(tokenizer, {})
    names = {tokenizer.convert_tokens_to_ids(token): token for token in SPECIAL}
    messages = [{"role": "user", "content": text}, {"role": "user", "content": "the"}]
    own = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    found = reader.read(messages).ids.tolist()
    protected = [names[index] for index in found if index in names]
    harmless = not any(token in text for token in (*SPECIAL, "<unk>")) and "\uff1c" not in text
    if harmless:
        assert found == own
        return
    if [names[index] for index in own if index in names][:2] == OWN[:2]:  # the tokenizer finds its tokens in a template
        assert protected == OWN
    else:
        assert found == own or protected == OWN
    if "<unk>" in text and unknown is not None:
        assert found.count(tokenizer.unk_token_id) < own.count(tokenizer.unk_token_id)
