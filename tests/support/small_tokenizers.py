"""Tokenizers trained in a moment on a few sentences: byte-level BPE, with and without a chat template."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from podtune.sft.model.template import CHAT_TEMPLATE

CORPUS = [
    "What does json.dumps() do? It turns an object into text: a str, not bytes.",
    "How is zip called? zip(*iterables, strict=False)",
    "The quick brown fox isn't lazy; it's 1234 times over the dog's head.",
    "user system assistant Grüße, naïve café — 数据 😀",
]
# Reading the Llama 3 family's expression: contractions, words with one mark before, numbers by three, marks,
# line breaks.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Trims what users write and writes a frame only when a conversation is complete: prompt and whole row
# diverge.
TRIMMING_TEMPLATE = (
    "{{- bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{%- for message in messages "
    "%}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim }}<|im_end|>\n{% "
    "endgeneration %}"
    "{% else %}{{ message['content'] | trim }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<|think|>{% endif %}"
)


@functools.cache
def chatml() -> PreTrainedTokenizerFast:
    """GPT-2's words and ChatML with generation markers, as the models built here have."""
    return _wrap(_train(pre_tokenizers.ByteLevel(add_prefix_space=False)), chat_template=CHAT_TEMPLATE)


@functools.cache
def llama_like() -> PreTrainedTokenizerFast:
    """Llama 3's words, NFC, a beginning-of-text token added by the post-processor, and a template that
    trims.
    """
    split = pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated")
    tokenizer = _train(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    return _wrap(tokenizer, bos_token="<|bos|>", chat_template=TRIMMING_TEMPLATE)


def plain() -> PreTrainedTokenizerFast:
    """No chat template."""
    return _wrap(_train(pre_tokenizers.ByteLevel(add_prefix_space=False)))


class Overriding(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer with its own way of encoding, as some on the hub have: it must be asked row by row."""

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._encode_plus(
            text.replace("json", "JSON") if isinstance(text, str) else text, *args, **kwargs
        )


def overriding() -> PreTrainedTokenizerFast:
    """See :class:`Overriding`."""
    return _wrap(
        _train(pre_tokenizers.ByteLevel(add_prefix_space=False)), Overriding, chat_template=CHAT_TEMPLATE
    )


def _train(words: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|think|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _wrap(
    tokenizer: Tokenizer, kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast, **more: Any
) -> PreTrainedTokenizerFast:
    return kind(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", **more)
