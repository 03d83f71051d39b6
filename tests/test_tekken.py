"""tekken.json alone, as in newer folders of Mistral: by definition, and against mistral-common
where it is installed, with the files that it ships."""

import base64
import json

import pytest

from loading.tokenizer import load_tokenizer
from loading.tokenizers.ranks import TEKKEN_PATTERN

MERGES = [b"th", b"the", b" the", b" c", b"at", b" cat", b"\xc3\xb6", b"12"]
TEXTS = [
    "the cat",
    " the  cat\n\n",
    "cat12 1234",
    "w\u00f6rld \u65e5\u672c \U0001f389",
    "</s>[INST] x [/INST]",
    "",
    "a" * 300,
    "CamelCaseIT d\u2019accord/\n/ x\t\ty  ",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 e\u0301",
]


def tekken(**changes) -> dict:
    tokens = [bytes([byte]) for byte in range(256)] + MERGES + [b"cut off"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    special = [
        {"rank": i, "token_str": name, "is_control": True}
        for i, name in enumerate(("<unk>", "<s>", "</s>"))
    ]
    special.append({"rank": 5, "token_str": "[INST]", "is_control": True})
    config = {
        "pattern": TEKKEN_PATTERN,
        "num_vocab_tokens": len(tokens),
        "default_num_special_tokens": 20,
        "default_vocab_size": 20 + len(tokens) - 1,
        "version": "v11",
    }
    return {"config": config, "vocab": vocab, "special_tokens": special, **changes}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    return tmp_path


def test_a_small_vocabulary_by_definition(folder):
    """The lowest rank merges first; ids begin behind the special tokens; what lies beyond the
    vocabulary is cut off."""
    tokenizer, id = load_tokenizer(folder), {token: 20 + 256 + i for i, token in enumerate(MERGES)}
    assert tokenizer.encode("the cat") == [1, id[b"the"], id[b" cat"]]
    assert tokenizer.encode("th cat12", bos=False) == [
        id[b"th"],
        id[b" cat"],
        20 + ord("1"),
        20 + ord("2"),
    ]
    assert tokenizer.encode("cut off", bos=False)[-1] == 20 + ord("f")
    assert tokenizer.vocab_size == 20 + 256 + len(MERGES) and tokenizer.stop_ids == {2}
    assert (
        tokenizer.bos_id == 1
        and tokenizer.specials["[INST]"] == 5
        and tokenizer.specials["<SPECIAL_4>"] == 4
    )
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 5 not in tokenizer.encode("[INST]") and tokenizer.parse("[INST]") == [5]


def test_older_files_name_no_special_tokens(folder):
    (folder / "tekken.json").write_text(json.dumps(tekken(special_tokens=None)))
    specials = load_tokenizer(folder).specials
    assert (specials["[INST]"], specials["[TOOL_CALLS]"], specials["[SYSTEM_PROMPT]"]) == (3, 9, 17)


BROKEN = {
    "a rank twice": (
        {"vocab": [{"rank": 0, "token_bytes": "YQ=="}] * 9 + [{"rank": 0, "token_bytes": "Yg=="}]},
        "invalid values",
    ),
    "no vocabulary": ({"vocab": None}, "not a tekken vocabulary"),
    "no base64": ({"vocab": [{"rank": 0, "token_bytes": "?"}]}, "not a tekken vocabulary"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_named(what, folder):
    changes, named = BROKEN[what]
    (folder / "tekken.json").write_text(json.dumps(tekken(**changes)))
    with pytest.raises(ValueError) as error:
        load_tokenizer(folder)
    assert str(folder) in str(error.value) and named in str(error.value)


@pytest.mark.parametrize("which", ["small", "tekken_240718.json", "tekken_240911.json"])
def test_ids_are_mistral_commons(which, folder):
    """Its own reader on the same file, whose vocabularies it ships."""
    theirs = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    file = folder / "tekken.json"
    if which != "small":
        import mistral_common

        shipped = next(
            file for file in __import__("pathlib").Path(mistral_common.__file__).parent.rglob(which)
        )
        file.write_bytes(shipped.read_bytes())
    want, got = theirs.Tekkenizer.from_file(file), load_tokenizer(folder)
    assert (
        got.vocab_size == want.n_words and got.bos_id == want.bos_id and want.eos_id in got.stop_ids
    )
    for text in [*TEXTS, *(chr(i) * 3 + " x" for i in range(32, 3000, 7))]:
        assert got.encode(text, bos=False) == want.encode(text, bos=False, eos=False), text
