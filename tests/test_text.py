import logging
from logging.handlers import QueueHandler
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from zoo import make_tokenizer

from magicpig.engine.text import Detokenizer
from magicpig.models.quiet import token_ids

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. Isn't it ?",
    "Ein Bär sagt: schöne Grüße!",
    "敏捷的棕色狐狸跳过懒狗。素早い茶色の狐",
    "emoji 🦊🐶👩‍👩‍👧 and 🇩🇪 flags",
]
SPECIAL = ["<s>", "</s>"]


def wrapped(tokenizer, **options):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **options
    )


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens(["<think>"])
    return wrapped(tokenizer)


def metaspace():
    tokenizer = Tokenizer(models.BPE(unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return wrapped(tokenizer, clean_up_tokenization_spaces=False)


def byte_fallback():
    """Built like Llama 2's: characters that are not in the vocabulary are single bytes."""
    pieces = [*SPECIAL, "▁", *"abcdefgh.", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<s>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrapped(tokenizer)


BYTE_LEVEL, METASPACE, BYTE_FALLBACK = byte_level(), metaspace(), byte_fallback()
ALL = pytest.mark.parametrize(
    "tokenizer",
    [BYTE_LEVEL, METASPACE, BYTE_FALLBACK],
    ids=["byte_level", "metaspace", "byte_fallback"],
)
TEXTS = st.text(st.sampled_from("abc def.gh éß狐狸🦊👩‍👧\n"), max_size=40) | st.sampled_from(
    SENTENCES
)


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def streamed(tokenizer, ids, stop=()):
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = [detokenizer.push(i) for i in ids]
    return [*pieces, detokenizer.finish()], detokenizer.stopped


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


@ALL
@given(text=TEXTS)
def test_the_pieces_of_a_text_make_the_text(tokenizer, text):
    ids = ids_of(tokenizer, text)
    assert "".join(streamed(tokenizer, ids)[0]) == decoded(tokenizer, ids)


@given(ids=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=60))
def test_any_tokens_of_bytes_make_what_decode_gives(ids):
    assert "".join(streamed(BYTE_LEVEL, ids)[0]) == decoded(BYTE_LEVEL, ids)


@given(ids=st.lists(st.integers(0, len(METASPACE) + 2), max_size=60))
def test_any_tokens_with_spaces_and_unknown_ids_make_what_decode_gives(ids):
    assert "".join(streamed(METASPACE, ids)[0]) == decoded(METASPACE, ids)


@given(raw=st.binary(max_size=60), between=st.sampled_from([[], [0], [1, 1]]))
def test_any_bytes_with_special_tokens_between_make_what_decode_gives(raw, between):
    letters = pre_tokenizers.ByteLevel.alphabet()  # one for each byte
    letters.sort()
    ids = [BYTE_LEVEL.convert_tokens_to_ids(letters[byte]) for byte in raw]
    ids = [i for token in ids for i in (token, *between)]
    assert "".join(streamed(BYTE_LEVEL, ids)[0]) == decoded(BYTE_LEVEL, ids)


@pytest.mark.parametrize("num_bytes", range(14))
def test_a_character_after_bytes_without_meaning_is_whole(num_bytes):
    character = ids_of(BYTE_LEVEL, "🧪")
    ids = character[:1] * num_bytes + character
    assert "".join(streamed(BYTE_LEVEL, ids)[0]) == "\ufffd" * num_bytes + "🧪"


@ALL
def test_no_piece_shows_half_a_character(tokenizer):
    text = "abc 狐狸🦊 def 🦊." if tokenizer is not METASPACE else "the 狐狸 fox"
    pieces, _ = streamed(tokenizer, ids_of(tokenizer, text))
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) >= 3


def test_an_unfinished_character_comes_with_finish():
    ids = ids_of(BYTE_LEVEL, "a🧪")[:-1]
    assert streamed(BYTE_LEVEL, ids)[0][-1] == "\ufffd"


def test_the_leading_space_of_later_words_is_kept():
    ids = ids_of(METASPACE, "the quick fox")
    with_specials = [0, *ids[:2], 1, 1, *ids[2:], 1]
    assert "".join(streamed(METASPACE, with_specials)[0]) == "the quick fox"


def test_an_unknown_id_does_not_make_the_next_token_the_first():
    (space,) = METASPACE.convert_tokens_to_ids(["▁"])
    assert "".join(streamed(METASPACE, [space, len(METASPACE) + 9, space])[0]) == " "


def test_text_that_was_shown_is_not_cleaned_up():
    words = ["<s>", "</s>", "is", "it", "?"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<s>"))
    cleaning = wrapped(tokenizer, clean_up_tokenization_spaces=True)
    assert decoded(cleaning, [2, 3, 4]) == "is it?"
    assert "".join(streamed(cleaning, [2, 3, 4])[0]) == "is it ?"


def until_stop(text, stop):
    """The slow truth: read character by character until a stop string is complete."""
    for end in range(len(text) + 1):
        matching = [s for s in stop if text[:end].endswith(s)]
        if matching:
            return text[: end - max(map(len, matching))], True
    return text, False


@ALL
@given(
    text=st.text(st.sampled_from("ab c狐🦊"), max_size=30),
    stop=st.lists(st.text(st.sampled_from("ab c狐🦊"), min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_before_the_first_complete_stop_string(tokenizer, text, stop):
    ids = ids_of(tokenizer, text)
    pieces, stopped = streamed(tokenizer, ids, tuple(stop))
    assert ("".join(pieces), stopped) == until_stop(decoded(tokenizer, ids), stop)


@pytest.mark.parametrize("stop", [("nk", "hi"), ("in", "think"), ("i", "thi", "hi"), ("k>", "<")])
def test_of_several_stop_strings_in_a_token_the_first_complete_one_counts(stop):
    (think,) = ids_of(BYTE_LEVEL, "<think>")
    pieces, stopped = streamed(BYTE_LEVEL, [think], stop)
    assert ("".join(pieces), stopped) == until_stop("<think>", stop)


def test_a_stop_string_of_bytes_without_meaning():
    lone_byte = ids_of(BYTE_LEVEL, "🧪")[0]
    pieces, stopped = streamed(BYTE_LEVEL, [lone_byte] * 20, ("\ufffd\ufffd",))
    assert (set(pieces), stopped) == ({""}, True)


@pytest.mark.parametrize("stop", ["fox jumps", "T", "dog.", "x j", "quick brown fox jumps over t"])
def test_nothing_of_a_stop_string_leaks(stop):
    text = "The quick brown fox jumps over the lazy dog."
    detokenizer = Detokenizer(BYTE_LEVEL, ("never seen", stop))
    shown = ""
    for i in ids_of(BYTE_LEVEL, text):
        shown += detokenizer.push(i)
        assert text[: text.index(stop)].startswith(shown)
    assert detokenizer.stopped
    assert detokenizer.push(5) == detokenizer.finish() == ""
    assert shown == text[: text.index(stop)]


def test_what_only_began_like_a_stop_string_is_shown():
    ids = ids_of(BYTE_LEVEL, "The quick fo")
    pieces, stopped = streamed(BYTE_LEVEL, ids, ("fox",))
    assert "".join(pieces) == "The quick fo"
    assert pieces[-1] == "fo"
    assert not stopped


@pytest.mark.parametrize("kind", ["text", "bytes without meaning", "special tokens"])
def test_the_work_per_token_does_not_grow(kind):
    decoded_tokens = 0

    class Counting:
        def decode(self, token_ids, **options):
            nonlocal decoded_tokens
            decoded_tokens += len(token_ids)
            return BYTE_LEVEL.decode(token_ids, **options)

    lone_byte = ids_of(BYTE_LEVEL, "🧪")[:1]
    ids = {
        "text": ids_of(BYTE_LEVEL, " ".join(SENTENCES)) * 10,
        "bytes without meaning": lone_byte * 500,
        "special tokens": [1] * 500,
    }[kind]
    pieces, _ = streamed(Counting(), ids)
    assert "".join(pieces) == decoded(BYTE_LEVEL, ids)
    assert decoded_tokens < 30 * len(ids)


def test_texts_longer_than_a_context_are_no_noise():
    """Whoever has a use for the tokens says what is wrong, in words that are right."""
    tokenizer, said = make_tokenizer(), SimpleQueue()
    tokenizer.model_max_length = 10
    logger, handler = logging.getLogger("transformers"), QueueHandler(said)
    logger.addHandler(handler)
    try:
        tokens = token_ids(tokenizer, "a text that is too long")
        assert said.empty()
        assert tokenizer("a text that is too long")["input_ids"] == tokens
        assert "longer than" in said.get_nowait().getMessage()  # by transformers
    finally:
        logger.removeHandler(handler)
