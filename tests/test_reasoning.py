"""Problems of reasoning, held to a solver that knows their text alone."""

import re

import pytest
from story_solver import solve

from magicpig.evals import reasoning
from magicpig.evals.story import LARGEST


def words(text):
    """Stands for a tokenizer."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def tokens(sample):
    return words(sample.context + sample.question + sample.answer_prefix) + sample.max_tokens


def story(sample):
    """The statements of a problem."""
    return re.split(r"(?<=\.) ", sample.context.partition("Statements:\n")[2])


PROBLEMS = [
    (task, length, index)
    for task in reasoning.TASKS
    for length, count in ((800, 40), (4096, 6))
    for index in range(count)
]


def test_the_answer_takes_exactly_the_operations_that_the_task_names():
    for task, length, index in PROBLEMS:
        sample = reasoning.make(task, length, index, words)
        solution = solve(sample.context, sample.question)
        assert sample.answers == (str(solution.answer),)
        assert solution.operations == reasoning.OPERATIONS[task]
        assert 1 <= solution.answer <= LARGEST
        assert solution.num_statements > len(solution.used)


def test_every_needed_statement_is_needed():
    for task in reasoning.TASKS:
        sample = reasoning.make(task, 1024, 0, words)
        for statement in solve(sample.context, sample.question).used:
            others = [text for text in story(sample) if text != statement]
            with pytest.raises(ValueError, match="not defined"):
                solve(" ".join(others), sample.question)


def test_the_example_is_solved_in_the_form_that_is_asked_for():
    for task, length, index in PROBLEMS:
        sample = reasoning.make(task, length, index, words)
        example = sample.context.partition("Statements:")[0]
        told = re.search(r"Example: (.*)\nQuestion: (.*)\nSolution: (.*)\n", example)
        solution = solve(f"Statements:\n{told[1]}", told[2])
        assert told[3].endswith(f"The answer is {solution.answer}.")
        assert solution.operations == told[3].count("=") == reasoning.OPERATIONS[task]
        for left, right in re.findall(r"(\d+ [-+*] \d+) = (\d+)", told[3]):
            assert eval(left) == int(right)
        its_places = set(re.findall(r"[A-Z]\w+ [A-Z]\w+(?= has)", told[1]))
        places = set(re.findall(r"[A-Z]\w+ [A-Z]\w+(?= has)", sample.context[len(example) :]))
        assert not its_places & places


@pytest.mark.parametrize("length", [800, 1024, 4096, 16384])
def test_prompts_fill_the_length(length):
    for task in reasoning.TASKS:
        sample = reasoning.make(task, length, 0, words, reserve=30)
        assert length - 25 < tokens(sample) + 30 <= length


def test_what_is_needed_lies_anywhere():
    places = []
    for index in range(40):
        sample = reasoning.make("ops2", 2048, index, words)
        statements = story(sample)
        used = solve(sample.context, sample.question).used
        places += [statements.index(statement) / len(statements) for statement in used]
    for third in range(3):
        assert sum(third / 3 <= place < (third + 1) / 3 for place in places) > len(places) / 5


def test_others_follow_from_what_is_needed_and_share_places_and_things():
    sample = reasoning.make("ops4", 4096, 1, words)
    solution = solve(sample.context, sample.question)
    others = [text for text in story(sample) if text not in solution.used]
    needed = {re.match(r"\w+ \w+", text)[0] for text in solution.used}
    assert len(others) == solution.num_statements - len(solution.used)
    assert sum(re.match(r"\w+ \w+", text)[0] in needed for text in others) > 10
    assert sum(any(place in text[12:] for place in needed) for text in others) > 10
    assert sum(not any(place in text for place in needed) for text in others) > 10


def test_problems_depend_on_their_arguments_alone():
    first = reasoning.make("ops4", 2048, 3, words, seed=5)
    assert reasoning.make("ops4", 2048, 3, words, seed=5) == first
    assert reasoning.make("ops4", 2048, 4, words, seed=5).context != first.context
    assert reasoning.make("ops4", 2048, 3, words, seed=6).context != first.context


def test_answers_differ():
    answers = {reasoning.make("ops5", 800, index, words).answers for index in range(60)}
    assert len(answers) > 30


@pytest.mark.parametrize(
    ("output", "score"),
    [
        (" The answer is 12.", 1),
        ("Cedar Bay has 7 + 5 = 12 owls. The answer is **12**", 1),
        ("the answer is 12.0", 1),
        ("The answer is: 12\n\nQuestion: another. The answer is 7.", 1),
        ("So there are 12 owls.", 1),
        ("The answer is 123.", 0),
        ("The answer is 1,234, not 12.", 0),
        ("The answer is 112.", 0),
        ("The answer is -12.", 0),
        ("The answer is 12.5", 0),
        ("12 + 3 = 15 owls. The answer is 15.", 0),
        ("12 owls and 3 more are 15", 0),
        ("The answer is unknown.", 0),
        ("", 0),
    ],
)
def test_the_number_counts_and_not_its_digits(output, score):
    fields = {"context": "c", "question": "q", "answer_prefix": "Solution:", "max_tokens": 9}
    problem = reasoning.Problem(task="ops2", index=0, answers=("12",), **fields)
    assert problem.score(output) == score


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match=r"unknown task 'ops3'; known: ops2, ops4, ops5"):
        reasoning.make("ops3", 4096, 0, words)
    with pytest.raises(ValueError, match="ops5 cannot be made 200 tokens long"):
        reasoning.make("ops5", 200, 0, words)
    with pytest.raises(ValueError, match="index must be"):
        reasoning.make("ops2", 4096, -1, words)


def test_the_solver_refuses_what_it_does_not_understand():
    question = "How many owls does Mill Bay have?"
    for statements, message in (
        ("Mill Bay has some owls.", "not understood"),
        ("Mill Bay has 3 owls. Mill Bay has 4 owls.", "two statements"),
        ("Mill Bay has 3 foxes.", "not defined"),
        ("Mill Bay has 2 more owls than Mill Bay has owls.", "by itself"),
    ):
        with pytest.raises(ValueError, match=message):
            solve(statements, question)
    with pytest.raises(ValueError, match="no quantity is asked for"):
        solve("Mill Bay has 3 owls.", "Why?")
