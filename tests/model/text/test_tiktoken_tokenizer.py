"""Kimi's tokenizer against the tiktoken library and published ids."""

import base64
import itertools
import json

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.model.checkpoint.sources import open_source
from jaxspec.model.text.tiktoken_tokenizer import read_ranks
from jaxspec.model.text.tokenizer import Tokenizer
from tests.support.kimi_files import NAMES, TEXT, trained_ranks, true_size_ranks, write_kimi_tokenizer

# The published pattern, written out here once more.
PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
TEXTS = [
    TEXT,
    "",
    "I'M, we'LL, they'd've; it’s 'tis 's",
    "HTTPServerError XMLHttp McDonald ǅungla ßẞ ŒUVRE",
    "漢字かな交じり文ABC中文def１２３四五六",
    "1234567890 ٣٤٥ Ⅷ½ 0x7f 3.14",
    "a  b   c\t\td \n \n\n  e\r\n\r\n   ",
    "e\u0301 \u0e01\u0e33 \u200b\ufeff\u00a0\x00\x07 한글 ﬁ ſ K",
    "x" * 60 + " " * 60 + "ababa" * 20 + "=" * 40 + "aaa" * 21,
]


@pytest.fixture(scope="module")
def ranks():
    return trained_ranks(700)


@pytest.fixture(scope="module")
def kimi(ranks, tmp_path_factory):
    return Tokenizer.from_checkpoint(write_kimi_tokenizer(tmp_path_factory.mktemp("kimi") / "files", ranks))


@pytest.fixture(scope="module")
def reference(ranks):
    specials = {NAMES.get(n, (f"<|reserved_token_{len(ranks) + n}|>",))[0]: len(ranks) + n for n in range(256)}
    tokens = {token: rank for rank, token in enumerate(ranks)}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=tokens, special_tokens=specials)


def test_ids_are_those_of_tiktoken(kimi, reference):
    assert kimi.vocab_size == reference.n_vocab
    for text in TEXTS:
        ids = kimi.encode(text)
        assert ids == reference.encode(text, allowed_special="all"), text
        assert kimi.decode(ids, skip_special=False) == text
    for index in range(kimi.vocab_size):
        assert kimi.token_bytes(index) == reference.decode_single_token_bytes(index)


@given(
    st.text(st.sampled_from("aAbBstTdDlLvVe'’ \n\r\t019٣½一漢あア한ßſ.,-_(é\u0301\u3000😀"), max_size=40)
    | st.text(max_size=20)
    | st.lists(st.sampled_from(TEXT.split(" ")), max_size=8).map("".join)
)
@settings(max_examples=600, deadline=None)
def test_any_text_has_the_ids_of_tiktoken(kimi, reference, text):
    assert kimi.encode(text) == reference.encode(text, allowed_special="all")


def test_every_character_is_split_as_tiktoken_splits_it(kimi, reference):
    """Both engines' tables know the same letters, digits, spaces and Han characters."""
    codes = [*range(0xD800), *range(0xE000, 0x30000)]
    for start in range(0, len(codes), 64):
        # All of the first blocks, of the others, which hold few kinds of letters, one in nine.
        letters = map(chr, codes[start : start + 64 : 1 if start < 0x3400 else 9])
        text = "".join(f"a{letter}'s {letter}1{letter}一{letter}\n" for letter in letters)
        assert kimi.encode(text) == reference.encode(text, allowed_special="all"), hex(codes[start])


def test_very_long_texts_are_cut_as_the_published_encoder_cuts_them(kimi, reference, ranks):
    def published(text):
        """Runs of at most 25,000 (non-)space characters in pieces of 400,000 characters, counted one by one."""
        ids = []
        for start in range(0, len(text), 400_000):
            piece, begin, run = text[start : start + 400_000], 0, 0
            for place, character in enumerate(piece):
                run = run + 1 if place and character.isspace() == piece[place - 1].isspace() else 1
                if run > 25_000:
                    ids += reference.encode(piece[begin:place], allowed_special="all")
                    begin, run = place, 1
            ids += reference.encode(piece[begin:], allowed_special="all")
        return ids

    long = "ab " * 3 + "12" * 25_000 + " " * 25_001 + "y" * 25_000
    for text in (long, "word, " * 70_000):
        assert kimi.encode(text) == published(text)
    assert kimi.encode("12" * 25_000) != reference.encode("12" * 25_000)
    # In a conversation the run begins at the word before it, special tokens included.
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12" * 25_000}]
    text = "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>" + "12" * 25_000
    text += "<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert kimi.encode_chat(messages) == published(text)
    messages[1]["content"] += " [EOS]"
    ids = kimi.encode_chat(messages)
    assert [i for i in ids if i >= len(ranks)] == [i for i in published(text) if i >= len(ranks)]
    assert kimi.decode(ids, skip_special=False) == text.replace("<|im_end|><|im_a", " [EOS]<|im_end|><|im_a")


def test_published_ids(tmp_path):
    """Ids of the K2-Thinking tokenizer, in a vocabulary of its size."""
    ranks = true_size_ranks({14062: b"system", 2482: b"user", 69702: b"assistant"})
    kimi = Tokenizer.from_checkpoint(write_kimi_tokenizer(tmp_path / "kimi", ranks))
    assert kimi.vocab_size == 163840
    for text, ids in {
        "<|im_system|>system<|im_middle|>": [163594, 14062, 163601],
        "<|im_user|>user<|im_middle|>": [163587, 2482, 163601],
        "<|im_assistant|>assistant<|im_middle|>": [163588, 69702, 163601],
        "<think></think>": [163606, 163607],
        "[BOS][EOS]<|im_end|>[UNK][PAD]": [163584, 163585, 163586, 163838, 163839],
        "<|tool_calls_section_begin|><|tool_calls_section_end|>": [163595, 163596],
        "<|tool_call_begin|><|tool_call_argument_begin|><|tool_call_end|>": [163597, 163598, 163599],
        "<|reserved_token_163600|>": [163600],
    }.items():
        assert kimi.encode(text) == ids
    assert kimi.eos_token_ids == (163585, 163586, 163593)
    ids = kimi.encode_chat([{"role": "user", "content": "assistant"}])
    assert ids[:3] == [163594, 14062, 163601]
    assert ids[-8:] == [163587, 2482, 163601, 69702, 163586, 163588, 69702, 163601]


def test_special_tokens_in_messages_and_tools_stay_text(kimi):
    first = kimi.vocab_size - 256
    texts = ["".join(kimi.special_text(index) for index in range(first, first + 256)), "a<|im_end|>b</think>c[EOS]<|im"]
    schema = {"type": "object", "properties": {"<|im_end|>": {"type": "string", "description": "<|im_system|>"}}}
    for text in texts:
        messages = [{"role": "user", "name": text, "content": text}, {"role": "assistant", "content": text}]
        tools = [{"type": "function", "function": {"name": "f", "description": text, "parameters": schema}}]
        for variables in ({}, {"tools": tools}):
            ids = kimi.encode_chat(messages, **variables)
            plain = [{"role": message["role"], "content": "x"} for message in messages]
            expected = kimi.encode_chat(plain, **({"tools": [TOOL]} if variables else {}))
            assert [i for i in ids if i >= first] == [i for i in expected if i >= first]
            shown = kimi.decode(ids, skip_special=False)
            assert shown.count(text) == 4 if variables else 3
    assert kimi.encode("<|im_end|>") == [first + 2]


TOOL = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {}}}


def test_control_tokens_are_left_out_of_text_and_the_checkpoint_says_which(kimi):
    ids = kimi.encode("<think>a</think>b<|tool_call_end|><|im_end|>")
    assert kimi.decode(ids) == "<think>a</think>b<|tool_call_end|>"
    assert kimi.decode(ids, skip_special=False) == "<think>a</think>b<|tool_call_end|><|im_end|>"
    assert [kimi.special_text(index) for index in ids[:2]] == ["<think>", None]


def test_streams_never_break_a_character(kimi):
    text = "日本語 👩‍👩‍👧‍👦 naïve 한국어"
    stream, seen = kimi.detokenizer(), ""
    for index in itertools.chain.from_iterable(kimi.encode(letter) for letter in text):
        seen += stream.push([index])
        assert text.startswith(seen)
    assert seen == text


def test_conversion_writes_a_tokenizer_json_with_the_same_ids(kimi, ranks, tmp_path):
    source = write_kimi_tokenizer(tmp_path / "source", ranks)
    (source / "generation_config.json").write_text('{"eos_token_id": 702}')
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    (source / "tokenizer.json").write_text("{}")  # Somebody's conversion: the rank file is the original.
    (source / "config.json").write_text('{"architectures": ["KimiK25ForConditionalGeneration"]}')
    from safetensors.numpy import save_file

    save_file({}, source / "model.safetensors")
    before = open_source(source)
    folder = tmp_path / "converted" / "tokenizer"
    folder.mkdir(parents=True)
    before.write_tokenizer(folder)
    assert {file.name for file in folder.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    converted = Tokenizer.from_checkpoint(folder.parent)
    assert converted.fingerprint == kimi.fingerprint
    for text in TEXTS:
        assert converted.encode(text) == kimi.encode(text)
    assert converted.encode_chat([{"role": "user", "content": "hi"}]) == kimi.encode("hi<|im_end|>")
    with (source / "tiktoken.model").open("ab") as file:
        file.write(b"\n")
    assert open_source(source).fingerprint != before.fingerprint


def damage_lines(change):
    def damage(folder):
        path = folder / "tiktoken.model"
        lines = path.read_bytes().splitlines(keepends=True)
        change(lines)
        path.write_bytes(b"".join(lines))

    return damage


def settings_of(**changes):
    def damage(folder):
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_lines(lambda lines: lines.pop()), "added_tokens_decoder: found id 555, expected ids 299 to 554"),
        (damage_lines(lambda lines: lines.pop(7)), "rank 7 is missing, expected 0 to 299"),
        (damage_lines(lambda lines: lines.insert(3, b"%%% 3\n")), "line 4: found b'%%% 3', expected a token in base64"),
        (damage_lines(lambda lines: lines.insert(3, b"YWI= 3\n")), "line 5: found .*, expected a token in base64"),
        (damage_lines(lambda lines: lines.append(b"YQ== 300\n")), "token b'a' has several ranks"),
        (damage_lines(lambda lines: lines.__setitem__(slice(1), [b"//79 0\n"])), "byte 0x21 is missing"),
        (settings_of(tokenizer_class="LlamaTokenizer"), "tokenizer_class: found 'LlamaTokenizer', expected 'TikToken"),
        (settings_of(added_tokens_decoder={"x": {"content": "[BOS]"}}), "added_tokens_decoder: found id x"),
        (
            settings_of(added_tokens_decoder={"300": {"content": "a"}, "301": {"content": "a"}}),
            "added_tokens_decoder: found a name twice",
        ),
    ],
)
def test_damaged_files_are_refused_by_name(ranks, tmp_path, damage, message):
    folder = write_kimi_tokenizer(tmp_path / "kimi", ranks[:300])
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.from_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value) or "tiktoken.model" in str(caught.value)


def test_a_special_token_that_is_an_ordinary_one_too_is_refused(ranks, tmp_path):
    folder = write_kimi_tokenizer(tmp_path / "kimi", [*ranks[:300], b"[EOT]"])
    with pytest.raises(ValueError, match=r"tiktoken.model: holds '\[EOT\]' as rank 300, expected a special token"):
        Tokenizer.from_checkpoint(folder)


def test_ranks_are_read_in_order(tmp_path):
    lines = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]
    (tmp_path / "x").write_bytes(b"\n".join([*reversed(lines), b"", base64.b64encode(b"ab") + b" 256"]))
    assert read_ranks(tmp_path / "x")[254:] == [b"\xfe", b"\xff", b"ab"]
