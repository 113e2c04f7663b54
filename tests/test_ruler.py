"""RULER's tasks: lengths, and answers that are true by what the text itself says."""

import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from magicpig.evals import ruler
from magicpig.evals.ruler.draft import insert, most_units, spread
from magicpig.evals.ruler.texts import NOISE, adjectives, more_words, nouns, sentences, short_words
from magicpig.evals.sample import Sample
from magicpig.models import ModelError, pull

OWN_TASKS = [task for task in ruler.TASKS if not task.startswith("qa")]
ESSAYS = ["niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery"]
NEEDLE = re.compile(r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.")


def by_letters(text):
    """Tokens of a simple model: four letters each."""
    return -(-len(text) // 4)


@pytest.fixture(scope="module")
def by_tokenizer():
    """Tokens of the default model."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(pull())
    except ModelError as error:
        pytest.skip(f"the default model cannot be had: {error}")
    return lambda text: len(tokenizer(text, add_special_tokens=False).input_ids)


def make(task, length=2048, index=0, **options):
    return ruler.make(task, length, index, by_letters, **options)


def prompt(sample):
    return sample.context + sample.question + sample.answer_prefix


def needles(sample):
    return NEEDLE.findall(sample.context)


def listed(sample):
    """The words of cwe's list, without those of its example."""
    return re.findall(r"\d+\. (\w+)", sample.context.rsplit("Below is a numbered", 1)[1])


def test_the_published_tasks():
    assert len(OWN_TASKS) == 11
    assert set(ruler.TASKS) - set(OWN_TASKS) == {"qa_1", "qa_2"}


@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("task", OWN_TASKS)
def test_prompts_fill_their_length(task, length, by_tokenizer):
    sample = ruler.make(task, length, 0, by_tokenizer, reserve=40)
    tokens = by_tokenizer(prompt(sample)) + 40 + sample.max_tokens
    longest = max(map(len, sentences())) / 4 if task in ESSAYS else 120
    assert length - longest < tokens <= length


@pytest.mark.parametrize("task", OWN_TASKS)
def test_what_is_reserved_is_kept_free(task):
    sample, shorter = make(task, 3000), make(task, 3000, reserve=1000)
    assert by_letters(prompt(sample)) + sample.max_tokens <= 3000
    assert by_letters(prompt(shorter)) + sample.max_tokens <= 2000
    assert shorter.answers == sample.answers
    assert len(shorter.context) < len(sample.context)


@pytest.mark.parametrize("task", OWN_TASKS)
def test_samples_are_deterministic_and_differ(task):
    sample = make(task)
    assert sample == make(task)
    others = [make(task, index=1), make(task, seed=1), make(task, length=2049)]
    assert all(other.answers != sample.answers for other in others)
    assert all(other.context != sample.context for other in others)


@pytest.mark.parametrize("task", OWN_TASKS)
def test_answers_are_in_the_context_and_score(task):
    sample = make(task)
    assert (sample.task, sample.index) == (task, 0)
    assert all(answer in sample.context for answer in sample.answers)
    assert not any(answer in sample.question + sample.answer_prefix for answer in sample.answers)
    assert sample.context.endswith("\n")
    assert sample.question.startswith(("What ", "Question: "))
    assert sample.score(", ".join(sample.answers).upper()) == 1
    assert sample.score("I do not know.") == 0
    half = len(sample.answers) // 2
    assert sample.score(" ".join(sample.answers[:half])) == half / len(sample.answers)


@pytest.mark.parametrize(
    ("task", "hidden", "asked"),
    [
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_single_3", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_needles_in_text(task, hidden, asked):
    for index in range(5):
        sample = make(task, index=index)
        assert len(needles(sample)) == hidden
        assert len(sample.answers) == asked
        assert {value for key, value in needles(sample) if key in sample.question} == {
            *sample.answers
        }


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
def test_needles_among_needles(task):
    sample = make(task, length=4096)
    lines = sample.context.splitlines()[1:]
    found = [NEEDLE.fullmatch(line).groups() for line in lines]
    keys, values = zip(*found, strict=True)
    assert len(found) > 50
    assert len({*keys}) == len({*values}) == len(found)
    (answer,) = sample.answers
    assert dict(found)[sample.question.split()[7]] == answer


def test_needles_are_not_all_in_one_place():
    places = [make("niah_single_1", index=i).context.index("One of") for i in range(30)]
    length = len(make("niah_single_1").context)
    assert min(places) < 0.3 * length
    assert max(places) > 0.7 * length


def test_published_wording_of_needles():
    one = make("niah_multikey_1")
    key = one.question.split()[7]
    assert one.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
    )
    assert one.question == (
        f"What is the special magic number for {key} mentioned in the provided text?"
    )
    assert one.answer_prefix == (
        f" The special magic number for {key} mentioned in the provided text is"
    )
    many = make("niah_multiquery")
    assert many.context.startswith("Some special magic numbers are hidden within the following")
    keys = r"\S+, \S+, \S+, and \S+"
    assert re.fullmatch(
        rf"What are all the special magic numbers for {keys} mentioned in the provided text\?",
        many.question,
    )
    assert re.fullmatch(
        rf" The special magic numbers for {keys} mentioned in the provided text are",
        many.answer_prefix,
    )


def test_text_repeats_when_it_is_not_long_enough():
    sample = make("niah_single_2", length=300_000)
    assert by_letters(prompt(sample)) > 299_000
    assert sample.context.count(max(sentences(), key=len)) >= 2


@pytest.mark.parametrize("length", [1024, 4096])
def test_variable_tracking_follows_the_chain(length):
    sample = make("vt", length)
    heads = [m.start() for m in re.finditer("Memorize and track", sample.context)]
    assert len(heads) == 2
    example, text = sample.context[: heads[1]], sample.context[heads[1] :]
    for part, asked, names in (
        (example, example, example.split()[-5:]),
        (text, sample.question, [*sample.answers]),
    ):
        values = {}
        for name, of in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", part):
            values[name] = values.get(of, of)
        assert [*values] == names
        assert {*values.values()} == {*re.findall(r"the value (\d{5})", asked)}
    assert text.count(NOISE) > 10
    assert sample.answer_prefix.endswith("they are: ")


@pytest.mark.parametrize(("length", "often", "rarely"), [(2048, 6, 1), (4096, 30, 3)])
def test_common_words_are_the_most_common(length, often, rarely):
    sample = make("cwe", length)
    counts = Counter(listed(sample))
    common = counts.most_common(10)
    assert {word for word, _ in common} == {*sample.answers}
    assert {count for _, count in common} == {often}
    assert {*counts.values()} == {often, rarely}
    assert sample.context.count("Below is a numbered list of words.") == 2
    example, solved = sample.context.split("\n")[1], sample.context.split("in the list are: ")[1]
    words = Counter(re.findall(r"\d+\. (\w+)", example)).most_common(10)
    answers = re.findall(r"\d+\. (\w+)", solved.split("\n")[0])
    assert {word for word, _ in words} == {*answers}


def test_long_lists_take_more_words():
    sample = make("cwe", 32768)
    words = {*listed(sample)}
    assert {*short_words()} < words
    assert {*sample.answers} <= {*short_words()}


def test_lists_end_where_there_are_no_more_words():
    sample = make("cwe", 1 << 20)
    assert {*listed(sample)} == {*short_words(), *more_words()}


@pytest.mark.parametrize("length", [1024, 4096, 16384])
def test_frequent_words_are_the_most_frequent(length):
    sample = make("fwe", length)
    coded = sample.context.split("coded words. ", 1)[1].split()
    ranked = Counter(coded).most_common()
    assert [word for word, _ in ranked[:4]] == ["...", *sample.answers]
    assert ranked[3][1] > ranked[4][1]
    assert ranked[0][1] == pytest.approx(9 * ranked[2][1], abs=9)
    assert all(word == "..." or re.fullmatch("[a-z]{6}", word) for word in coded)


@pytest.fixture
def squad(tmp_path):
    """Two articles of SQuAD's form."""
    articles = [
        {
            "title": f"article {a}",
            "paragraphs": [
                {
                    "context": f"Town {a}-{p} has {100 + p} houses. " * 10,
                    "qas": [
                        {
                            "question": f"How many houses has town {a}-{p}?",
                            "answers": [{"text": f"{100 + p}"}, {"text": f"{100 + p} houses"}],
                        },
                        {"question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(6)
            ],
        }
        for a in range(2)
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": articles}))
    return path


@pytest.fixture
def hotpot(tmp_path):
    """Three questions of HotpotQA's form."""
    entries = [
        {
            "question": f"Which lake is near hill {i}?",
            "answer": f"Lake {i}",
            "context": [
                [f"Hill {i}", ["High. ", f"Lake {i} is near."]],
                ["Hills", ["Many."]],
            ],
        }
        for i in range(3)
    ]
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(entries))
    return path


def test_questions_of_squad(squad):
    sample = make("qa_1", 1024, index=7, qa_file=squad)
    assert sample.question == "Question: How many houses has town 1-1?"
    assert sample.answers == ("101", "101 houses")
    assert sample.match == "any"
    assert sample.score("It has 101.") == 1
    assert "Town 1-1 has 101 houses. " * 10 in sample.context
    assert "Town 1-5" in sample.context  # of the same article
    assert sample.context.endswith("and do not output any other words.\n\n")
    assert by_letters(prompt(sample)) + 32 <= 1024
    assert make("qa_1", 1024, index=7, qa_file=str(squad)) == sample


def test_questions_of_hotpot_and_repeated_documents(hotpot):
    sample = make("qa_2", 1024, index=2, qa_file=hotpot)
    assert sample.answers == ("Lake 2",)
    documents = re.findall(r"Document (\d+):\n(.+)\n", sample.context)
    assert [int(number) for number, _ in documents] == [*range(1, len(documents) + 1)]
    assert {title for _, title in documents} == {"Hill 0", "Hill 1", "Hill 2", "Hills"}


def test_errors(squad, hotpot, tmp_path):
    with pytest.raises(ValueError, match="unknown task 'niah'; known: niah_single_1, "):
        make("niah")
    with pytest.raises(ValueError, match="cannot be made 64 tokens long: its shortest form has"):
        make("vt", 64)
    with pytest.raises(ValueError, match="length must be"):
        make("vt", 0)
    with pytest.raises(ValueError, match="index must be"):
        make("vt", index=-1)
    with pytest.raises(ValueError, match=r"qa_1 needs qa_file: .* SQuAD"):
        make("qa_1")
    with pytest.raises(ValueError, match=r"qa_2 needs qa_file: .* HotpotQA"):
        make("qa_2")
    with pytest.raises(ValueError, match="cannot be read"):
        make("qa_1", qa_file=tmp_path / "none.json")
    with pytest.raises(ValueError, match="has not the form of SQuAD"):
        make("qa_1", qa_file=hotpot)
    with pytest.raises(ValueError, match="has not the form of HotpotQA"):
        make("qa_2", qa_file=squad)
    with pytest.raises(ValueError, match="has 12 questions, none of index 12"):
        make("qa_1", index=12, qa_file=squad)
    text = tmp_path / "text.json"
    text.write_text("no JSON")
    with pytest.raises(ValueError, match="is not a JSON file of SQuAD"):
        make("qa_1", qa_file=text)


def test_samples_check_themselves():
    fields = {"task": "t", "index": 0, "context": "", "question": "", "answer_prefix": ""}
    with pytest.raises(ValueError, match="answers must be"):
        Sample(**fields, answers=(), max_tokens=1)
    with pytest.raises(ValueError, match="answers must be"):
        Sample(**fields, answers=("",), max_tokens=1)
    with pytest.raises(ValueError, match="match must be one of all, any, not 'one'"):
        Sample(**fields, answers=("a",), max_tokens=1, match="one")
    anything = Sample(**fields, answers=("Yes", "no"), max_tokens=1, match="any")
    assert [anything.score(output) for output in ("well, yes", "NO", "maybe")] == [1, 1, 0]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=300),
    length=st.integers(0, 4000),
    least=st.integers(0, 5),
)
def test_search_finds_the_last_that_fits(sizes, length, least):
    most = least + len(sizes)
    calls = []

    def tokens(units):
        assert least <= units <= most
        calls.append(units)
        return 50 + sum(sizes[: units - least])

    if length < 50:
        with pytest.raises(ValueError, match="its shortest form has 50"):
            most_units(tokens, length, least, most)
        return
    found = most_units(tokens, length, least, most)
    assert tokens(found) <= length
    assert found == most or tokens(found + 1) > length
    assert len({*calls}) >= len(calls) - 3  # nothing is counted twice


@given(st.integers(0, 20), st.integers(0, 5), st.randoms(use_true_random=False))
def test_insert_keeps_order(lines, things, rng):
    numbers, names = [str(i) for i in range(lines)], [chr(97 + i) for i in range(things)]
    result = insert(numbers, names, spread(rng, things))
    assert [each for each in result if each in numbers] == numbers
    assert [each for each in result if each in names] == names


def test_shipped_text():
    assert 400_000 < sum(map(len, sentences())) < 700_000
    assert all(each == " ".join(each.split()) and each.isascii() for each in sentences())
    assert not NEEDLE.search(" ".join(sentences()))
    assert min(len(adjectives()), len(nouns())) > 300
    assert len({*short_words(), *more_words()}) == len(short_words()) + len(more_words()) > 11_000
